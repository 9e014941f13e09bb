"""Checkpoints that callbacks save because a run fails: only if all ranks have stopped at the same step.

rank 0   error in a hook, step 12   --+-- the same on both: the callback saves
rank 1   error in a hook, step 12   --+

rank 0   waits for a message of rank 1
rank 1   error in its step          alone: it saves nothing, says so, and fails with its error

What goes wrong in callbacks after the error is shown in one line. The error stays the run's own.
"""

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
_ASK, _POLL = 0.5, 0.01
"""seconds to wait for answers, and between two questions"""


class SavesOnException:
    """One rank's side of it, for one run.

    The ranks' monitors agree: a rank that waits for another one's message can't take part in a collective.

    Args:
        trainer: whose callbacks save.
        failures: this rank's; have the monitor.
        num_ranks: of the world.
        finish: called once a callback has saved; waits until the checkpoint is there.
        newest: returns the path of the last checkpoint that this run has saved, None without one.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        failures: Failures,
        num_ranks: int,
        *,
        finish: Callable[[], object],
        newest: Callable[[], str | None],
    ) -> None:
        self._trainer = trainer
        self._failures = failures
        self._num_ranks = num_ranks
        self._finish, self._newest = finish, newest
        self._decision: str | None = None

    def adapt_callbacks(self, attributes: TemporaryAttributes) -> None:
        """Let the callbacks that save ask all ranks before, and show what goes wrong in all of them."""
        for owner in (*callbacks_of(self._trainer), getattr(self._trainer, "datamodule", None)):
            if isinstance(owner, Checkpoint) and self._num_ranks > 1:
                attributes.set(owner, "on_exception", _AgreedHook(owner.on_exception, self))
            elif owner is not None and not isinstance(owner, Checkpoint):
                attributes.set(owner, "on_exception", _Shown(owner.on_exception))

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
        is_after_error = sys.exception() is not None and self._trainer.state.status == TrainerStatus.INTERRUPTED
        if is_after_error and self._num_ranks > 1:
            self._agree()

    def _agree(self) -> None:
        if self._decision is None:
            self._decision = self._decide()
        if self._decision != _AGREED:
            raise HanayoError(self._decision)

    def _decide(self) -> str:
        """Agree with all ranks that come here in time. What the first of them decides counts for all."""
        monitor, topic = self._failures.monitor, f"on_exception/{self._failures.run}"
        place = [self._trainer.global_step, *self._failures.position[:3]]
        monitor.answer(f"{topic}/place", lambda _: place)
        deadline = time.monotonic() + failure.GRACE / 2
        while (decision := monitor.verdict(topic)) is None:
            places = monitor.ask(f"{topic}/place", timeout=_ASK)
            if len(places) == self._num_ranks or time.monotonic() > deadline:
                decision = monitor.decide(topic, self._judge(places))
                break
            time.sleep(_POLL)
        return str(decision)

    def _judge(self, places: dict[int, list[int]]) -> str:
        """Whether all have stopped at the same place; if not, why that is refused."""
        missing = [rank for rank in range(self._num_ranks) if rank not in places]
        if missing:
            return (
                f"{self._name(missing[0])} has not stopped with an error, so ranks may be at different steps. "
                f"{self._way_out()}"
            )
        first, own = min(places.items())
        rank, other = next((one for one in sorted(places.items()) if one[1] != own), (first, own))
        if own == other:
            return _AGREED
        return (
            f"{self._name(first)} has stopped after step {own[0]} in its batch {own[1]}, {self._name(rank)} after step "
            f"{other[0]} in its batch {other[1]}. {self._way_out()}"
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._failures.monitor.members[rank].place})"

    def _way_out(self) -> str:
        newest = self._newest()
        return "No checkpoint was saved before." if newest is None else f"Resume from {newest}, which was saved before."


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


class _Shown:
    """Takes the place of a function that is called after an error. What goes wrong in it is shown in one line."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", "on_exception")  # a partial has none

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._function(*args, **kwargs)
        except Exception as error:
            owner = type(getattr(self._function, "__self__", None)).__name__
            line = str(error).partition("\n")[0]
            print(f"{owner}.{self.__name__} failed, too: {type(error).__name__}: {line}", file=sys.stderr)

    def __reduce__(self) -> Any:
        return _itself, (self._function,)


def _itself(hook: Any) -> Any:
    return hook
