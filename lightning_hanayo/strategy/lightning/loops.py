"""Lightning's loops on several ranks: equal numbers of loaders and batches, and validation at the same time.

`agree_on_counts`: all ranks ask for the same number of loaders, or the run ends with an error that names the ranks.

`SameLength`: an epoch has as many training batches as the data rank with the fewest.

data rank 0    b0  b1  b2  b3  b4       lengths known: 5 and 3, agreed before training
data rank 1    b0  b1  b2               unknown: "I have one more" before each batch, until one has none
both           b0  b1  b2  end

`validate_together`: all ranks validate after the same batch if `val_check_interval` is a time, which each rank measures
by its own clock.

`load_instead`: a run starts from another checkpoint than the one that `fit` was given.

`end_searches_on_failure`: a search for the largest batch size ends when one of several ranks is out of memory.

trial     2 fits    4 fits    8: rank 1 is out of memory, while rank 0 waits for its message
error     on all ranks: "rank 1 is out of memory with batch_size=8 ... 4 has fitted"

In one process Lightning goes on with a smaller size. Here the batch is half done on the other ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.parsing import lightning_getattr

from lightning_hanayo.errors import HanayoError, UnsupportedError, available, listed
from lightning_hanayo.pipeline_parallel.comm.object_collectives import all_gather_objects
from lightning_hanayo.strategy.joining import on_all_ranks
from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.strategy.run import Run


def keep_inference_mode(trainer: "pl.Trainer", attributes: TemporaryAttributes) -> None:
    """Run the loops in the mode that the Trainer was given, until `attributes` are restored.

    Lightning uses `torch.no_grad` with gloo, whose collectives once failed in inference mode. A validation within `fit`
    never runs in inference mode.
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        if loop.inference_mode:
            attributes.wrap(loop, "run", torch.inference_mode()(lambda run: run()))


def agree_on_counts(trainer: "pl.Trainer", attributes: TemporaryAttributes) -> None:
    """Compare the numbers of loaders whenever a loop asks for its loaders. Called by all ranks of several."""
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    for loop in (*loops, trainer.predict_loop):
        attributes.wrap(loop._data_source, "dataloader", partial(_request, loop._data_source.name))


def check_counts(name: str, counts: Sequence[int]) -> None:
    """Check that all ranks have the same number of loaders. `counts`: by rank.

    Raises:
        HanayoError: they don't.
    """
    if len(set(counts)) > 1:
        found = listed([f"{count} on rank {rank}" for rank, count in enumerate(counts)], 4)
        raise HanayoError(f"{name} gives ranks different numbers of loaders: {found}. Return as many on each rank")


def _request(name: str, request: Callable[[], Any]) -> Any:
    """Lightning's request for loaders, and the check."""
    loaders = request()
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    check_counts(name, on_all_ranks(lambda: len(combined.flattened)))
    return loaders


class SameLength:
    """One data rank's part in the agreement for one training loader. Called by all of them.

    Args:
        own: the number of this rank's batches; None: not known.
        is_certain: whether the loader surely gives as many.
        get_run: returns the run under way.
    """

    def __init__(self, own: int | None, is_certain: bool, get_run: Callable[[], Run]) -> None:
        self._get_run = get_run
        found = all_gather_objects(self._group, (own, is_certain))
        lengths = [length for length, _ in found if length is not None]
        self.length = min(lengths) if len(lengths) == len(found) else None
        """the number of batches on all data ranks; None if one of them doesn't know its own"""
        self.is_certain = all(certain for _, certain in found)
        """whether each data rank surely has as many"""
        if self.length is not None:
            _warn(lengths)

    def all_have_one_more(self, has_one: bool, num_read: int) -> bool:
        """Whether all data ranks have a batch, after `num_read` that all had. Waits for the slowest of them."""
        have_one = torch.tensor(int(has_one))
        dist.all_reduce(have_one, dist.ReduceOp.MIN, self._group)
        if not have_one:
            _warn([num_read + int(one) for one in all_gather_objects(self._group, has_one)], or_more=True)
        return bool(have_one)

    @property
    def _group(self) -> dist.ProcessGroup:
        """The data ranks. Not kept: the group would outlive a failure."""
        return available(self._get_run().groups.data_control, "there are several data ranks")


def _warn(lengths: list[int], *, or_more: bool = False) -> None:
    """Say which data rank has the fewest batches, if not all have as many."""
    fewest, most = min(lengths), max(lengths)
    if fewest < most:
        rank_zero_warn(
            f"Data rank {lengths.index(fewest)} has {fewest} training batches in this epoch, others up to {most}"
            f"{' or more' * or_more}. All end the epoch there; drop_last=True, or a DistributedSampler, uses all"
        )


def validate_together(trainer: "pl.Trainer", attributes: TemporaryAttributes) -> None:
    """Validate as soon as one rank would: its vote is asked for after each batch. Called by all ranks of several."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if trainer._val_check_time_interval is not None:  # type: ignore[attr-defined]
        agree = trainer.strategy.reduce_boolean_decision
        attributes.wrap(epoch_loop, "_should_check_val_fx", lambda own, fetcher: agree(own(fetcher), all=False))


Load = Callable[[Any, bool | None], None]
"""loads a checkpoint from a path, with `weights_only` as for `torch.load`; None: there is nothing to load"""


def load_instead(
    trainer: "pl.Trainer", attributes: TemporaryAttributes, load: Callable[[Load, Any, bool | None], None]
) -> None:
    """Call `load` where Lightning would load the checkpoint that the user gave.

    Args:
        trainer: of a run that has not loaded anything so far.
        attributes: restored at the end of the run.
        load: gets Lightning's own function, which it may call with other arguments, and the user's path.
    """
    attributes.wrap(trainer._checkpoint_connector, "resume_start", load)


def loaded(trainer: "pl.Trainer") -> Mapping[str, Any]:
    """The checkpoint that was loaded."""
    return trainer._checkpoint_connector._loaded_checkpoint


def was_in_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Whether it was saved in the middle of an epoch."""
    batches = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return bool(batches.get("current", {}).get("processed")) and not batches.get("is_last_batch")


def end_searches_on_failure(trainer: "pl.Trainer", attributes: TemporaryAttributes, rank: int) -> None:
    """Let a trial that fails end the run: `BatchSizeFinder`, and `Tuner.scale_batch_size`, which adds one.

    Args:
        trainer: of a run on several ranks.
        attributes: restored at the end of the run.
        rank: this process's, in the world.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, BatchSizeFinder):
            attributes.wrap(callback, "scale_batch_size", partial(_search, callback._batch_arg_name, rank))


def _search(
    name: str, rank: int, search: Callable[..., object], trainer: "pl.Trainer", module: "pl.LightningModule"
) -> None:
    """Lightning's search, with trials whose errors it doesn't catch."""
    loop: Any = trainer._active_loop
    attributes, fitted = TemporaryAttributes(), [0]

    def trial(run: Callable[[], Any]) -> Any:
        size: Any = lightning_getattr(module, name)
        try:
            result = run()
        except Exception as error:
            failure = error
            if is_oom_error(error):
                advice = f"{max(fitted)} has fitted: set it" if max(fitted) else "start with a smaller init_val"
                failure = UnsupportedError(
                    f"rank {rank} is out of memory with {name}={size}, and other ranks are in the middle of the batch, "
                    f"so the search can't go on. {advice}, without a BatchSizeFinder, or limit it with max_val"
                )
            # Lightning then restores model and loaders, for which it would wait for ranks that don't do so.
            attributes.set(loop, "load_state_dict", partial(_raise, failure))
            raise failure from (error if failure is not error else error.__cause__)
        fitted.append(size)
        return result

    attributes.wrap(loop, "run", trial)
    try:
        search(trainer, module)
    finally:
        attributes.restore()


def _raise(error: BaseException, *_: object) -> NoReturn:
    raise error
