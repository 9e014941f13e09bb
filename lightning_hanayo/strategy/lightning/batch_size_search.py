"""A search for the largest batch size on several ranks: it ends when one of them is out of memory.

trial     2 fits    4 fits    8: rank 1 is out of memory, while rank 0 waits for its message
error     on all ranks: "rank 1 is out of memory with batch_size=8 ... 4 has fitted"

In one process Lightning goes on with a smaller size. Here the batch is half done on the other ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.parsing import lightning_getattr

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of
from lightning_hanayo.strategy.patches import TemporaryAttributes


def end_searches_on_failure(trainer: "pl.Trainer", attributes: TemporaryAttributes, rank: int) -> None:
    """Let a trial that fails end the run: `BatchSizeFinder`, and `Tuner.scale_batch_size`, which adds one.

    Args:
        trainer: of a run on several ranks.
        attributes: restored at the end of the run.
        rank: this process's, in the world.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, BatchSizeFinder):
            search = partial(_search, callback.scale_batch_size, callback._batch_arg_name, rank)
            attributes.set(callback, "scale_batch_size", search)


def _search(
    own: Callable[..., object], name: str, rank: int, trainer: "pl.Trainer", module: "pl.LightningModule"
) -> None:
    """Lightning's search, with trials of ours."""
    loop: Any = trainer._active_loop
    attributes = TemporaryAttributes()
    attributes.set(loop, "run", _Trials(loop, module, name, rank, attributes))
    try:
        own(trainer, module)
    finally:
        attributes.restore()


class _Trials:
    """Takes the place of a loop's `run` while Lightning searches."""

    def __init__(
        self, loop: Any, module: "pl.LightningModule", name: str, rank: int, attributes: TemporaryAttributes
    ) -> None:
        self._loop, self._run = loop, loop.run
        self._module, self._name, self._rank = module, name, rank
        self._attributes = attributes
        self._fitted: list[int] = []

    def __call__(self) -> Any:
        size: Any = lightning_getattr(self._module, self._name)
        try:
            result = self._run()
        except Exception as error:
            failure = self._named(size) if is_oom_error(error) else error
            # Lightning then restores model and loaders, for which it would wait for ranks that don't do so.
            self._attributes.set(self._loop, "load_state_dict", partial(_raise, failure))
            raise failure from (error if failure is not error else error.__cause__)
        self._fitted.append(size)
        return result

    def _named(self, size: int) -> UnsupportedError:
        advice = f"{max(self._fitted)} has fitted: set it" if self._fitted else "start with a smaller init_val"
        return UnsupportedError(
            f"rank {self._rank} is out of memory with {self._name}={size}. A search for the batch size can't go on "
            f"after that, because other ranks are in the middle of the batch; {advice}, without a BatchSizeFinder, or "
            f"limit the search with max_val."
        )


def _raise(error: BaseException, *_: object) -> NoReturn:
    raise error
