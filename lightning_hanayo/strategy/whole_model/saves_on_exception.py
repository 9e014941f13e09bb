"""Checkpoints that callbacks save because a run fails: only if all ranks have stopped at the same step.

rank 0   error in a hook, step 12   --+-- the same on both: the callback saves
rank 1   error in a hook, step 12   --+

rank 0   waits for a message of rank 1
rank 1   error in its step          alone: it saves nothing, says so, and fails with its error
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_hanayo.errors import HanayoError, PeerFailed
from lightning_hanayo.strategy import failure
from lightning_hanayo.strategy.failure import Failures
from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes

_AGREED = "agreed"


class SavesOnException:
    """One rank's side of it, for one run.

    The ranks meet in the store: a rank that waits for another one's message can't take part in a collective.

    Args:
        trainer: whose callbacks save.
        failures: this rank's; has the store.
        num_ranks: of the world.
        end_run: called before an error leaves Lightning's handler, which would have ended the run.
        finish: called once a callback has saved; waits until the checkpoint is there.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        failures: Failures,
        num_ranks: int,
        *,
        end_run: Callable[[BaseException], object],
        finish: Callable[[], object],
    ) -> None:
        self._trainer = trainer
        self._failures = failures
        self._num_ranks = num_ranks
        self._end_run, self._finish = end_run, finish
        self._decision: str | None = None

    def adapt_callbacks(self, attributes: TemporaryAttributes) -> None:
        """Let the callbacks that save ask all ranks before."""
        for callback in callbacks_of(self._trainer):
            if isinstance(callback, Checkpoint) and self._num_ranks > 1:
                attributes.set(callback, "on_exception", _AgreedHook(callback.on_exception, self))

    def save(self, hook: Callable[..., object], exception: BaseException, *args: Any) -> None:
        """Run a callback's `on_exception`. What goes wrong in it is shown; the exception stays the run's error."""
        if isinstance(exception, PeerFailed):  # which says that a rank has failed alone
            return
        try:
            self._agree()
            hook(*args, exception)
            self._finish()
        except Exception as error:
            print(f"No checkpoint is saved on this {type(exception).__name__}: {error}", file=sys.stderr)

    def check(self) -> None:
        """Called before anything is saved. After an exception, it is a callback's own `on_exception` that saves.

        Raises:
            HanayoError: not all ranks have stopped at the same step.
        """
        exception = sys.exception()
        if exception is None or self._trainer.state.status != TrainerStatus.INTERRUPTED or self._num_ranks == 1:
            return
        try:
            self._agree()
        except HanayoError:
            self._end_run(exception)
            raise

    def _agree(self) -> None:
        if self._decision is None:
            self._decision = self._decide()
        if self._decision != _AGREED:
            raise HanayoError(self._decision)

    def _decide(self) -> str:
        """Agree with all ranks that come here in time. What the first of them decides counts for all."""
        key = f"hanayo/on_exception/{self._failures.run}"
        place = [self._trainer.global_step, *self._failures.position[:3]]
        try:
            store = self._failures.store
            store.set(f"{key}/{self._failures.rank}", json.dumps(place))
            found = self._places(key)
            return bytes(store.compare_set(f"{key}/decision", "", _judge(found))).decode()
        except RuntimeError as error:  # rank 0 has ended, and the store with it
            return f"rank 0 can't be reached ({error})"

    def _places(self, key: str) -> dict[int, list[int] | None]:
        """How far each rank was when it stopped; None for one that hasn't."""
        store, deadline = self._failures.store, time.monotonic() + failure.GRACE / 2
        keys = {rank: f"{key}/{rank}" for rank in range(self._num_ranks)}
        while not store.check(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(0.01)
        return {rank: json.loads(store.get(one)) if store.check([one]) else None for rank, one in keys.items()}


def _judge(places: dict[int, list[int] | None]) -> str:
    """Whether all have stopped at the same place; if not, why that is refused."""
    missing = [rank for rank, place in places.items() if place is None]
    if missing:
        return (
            f"rank {missing[0]} has not stopped with an error, so ranks may be at different steps. Resume from the "
            f"checkpoint that was saved before."
        )
    stopped = [(rank, place) for rank, place in places.items() if place is not None]
    (first, own), (rank, other) = stopped[0], next((one for one in stopped if one[1] != stopped[0][1]), stopped[0])
    if own == other:
        return _AGREED
    return (
        f"rank {first} has stopped after step {own[0]} in its batch {own[1]}, rank {rank} after step {other[0]} in its "
        f"batch {other[1]}. Resume from the checkpoint that was saved before."
    )


class _AgreedHook:
    """Takes the place of a callback's `on_exception`. Copies of the callback have its own again."""

    __name__ = "on_exception"

    def __init__(self, hook: Callable[..., object], saves: SavesOnException) -> None:
        self._hook = hook
        self._saves = saves

    def __call__(self, trainer: "pl.Trainer", module: "pl.LightningModule", exception: BaseException) -> None:
        callback = getattr(self._hook, "__self__", None)
        if isinstance(callback, ModelCheckpoint) and not callback.save_on_exception:
            self._hook(trainer, module, exception)
        else:
            self._saves.save(self._hook, exception, trainer, module)

    def __reduce__(self) -> Any:
        return _itself, (self._hook,)


def _itself(hook: Any) -> Any:
    return hook
