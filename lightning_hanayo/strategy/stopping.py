"""Stopping: how the ranks agree on the batch after which they stop, and the errors with which such a run ends.

           told                 decided: up to batch 8
rank 0     | batch 7             batch 8              | stops
rank 1     |      batch 8                             | stops      the furthest
rank 2     * batch 7 ........... batch 8              | stops      * got the signal; .. waits for the decision

1. The rank with the signal tells all monitors: from then on no main thread begins a batch.
2. One rank asks all monitors which batch they have begun, and decides on the last of these. Each rank runs up to its
   end. No collective is issued, and no main thread is asked: it may be in the middle of a batch, waiting for others.

A rank that doesn't answer could be anywhere; after `AGREE_WITHIN` seconds the decision is to end without a checkpoint.

SIGTERM    StoppedBySignal, Lightning's SIGTERMException     75, EX_TEMPFAIL: run it again
SIGINT     Interrupted, a KeyboardInterrupt                 130, as shells say it
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hanayo.strategy.failure import Failures

AGREE_WITHIN = 10.0
"""seconds from the signal until the run ends without an agreement"""
TAKE_OVER = 2.0
"""seconds until the other ranks try to decide: the arbiter may be frozen"""
LOOK = 0.1
"""seconds between two looks for a signal, and for a failure while a rank waits"""

Place = tuple[int, int]
"""the batches that a rank has begun in a run: of training, and of evaluation since then"""
END: Place = (1 << 62, 0)
"""the place of a rank whose run has ended"""


class Decision(NamedTuple):
    """Where all ranks stop, and why."""

    signal: int
    rank: int
    """the one that got the signal"""
    last: Place | None
    """the last batch that is run; None: the ranks couldn't agree"""
    missing: tuple[int, ...] = ()
    """ranks that didn't answer"""


class StopTogether:
    """One rank's part in stopping together, for one run whose failures are given: they have the monitor."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._topic = f"stop/{failures.run}"
        self._lock = threading.Lock()
        self._is_held = False
        """whether the main thread begins nothing before there is a decision"""
        self._is_told = False
        self._monitor = failures.monitor
        self._leave = self._monitor.on(f"{self._topic}/told", self._on_told)
        self._monitor.answer(self._topic, self._hold)

    @property
    def decision(self) -> Decision | None:
        """Of all ranks; None: there is none yet."""
        verdict = self._monitor.verdict(self._topic)
        if verdict is None:
            return None
        signal, rank, last, missing = verdict  # JSON has made lists of its tuples
        return Decision(signal, rank, last and tuple(last), tuple(missing))

    def expect(self) -> None:
        """The monitor thread is about to call `tell`: begin nothing before. Called in the handler; takes no lock.

        Else a short run could end before the monitor's thread reads the signal.
        """
        self._is_held = True

    def tell(self, signal: int) -> None:
        """Let all ranks stop. Called in the monitor thread; in a world of one rank in the handler of the signal."""
        if self._monitor.num_ranks > 1:
            self._monitor.tell(f"{self._topic}/told", signal)
        else:
            self._is_held = True
            self._monitor.propose(self._topic, Decision(signal, self._failures.rank, self._failures.position[:2]))

    def begin(self, place: Place) -> Decision | None:
        """Called by the main thread before a batch, and where an evaluation ends.

        Returns:
            None: go on. Else the decision: stop here.

        Raises:
            PeerFailed: another rank has failed while this one waited.
        """
        with self._lock:
            if not self._is_held:
                self.go_on(place)
                return None
        while (decision := self.decision) is None:
            self._failures.check_peers()
            self._monitor.verdict(self._topic, wait=LOOK)
        if decision.last is None or place > decision.last:
            return decision
        self.go_on(place)
        return None

    def go_on(self, place: Place) -> None:
        """Begin a batch without asking."""
        self._failures.position = (*place, 0, 0)

    def close(self) -> None:
        """The run has ended on this rank; others may still ask how far it is."""
        self._leave()
        self._monitor.answer(self._topic, lambda _: END)

    # in the monitor thread

    def _on_told(self, rank: int, signal: int) -> None:
        self._hold()
        if not self._is_told:
            self._is_told = True
            threading.Thread(target=self._decide, args=(rank, signal), daemon=True, name="hanayo-stop").start()

    def _hold(self, _: Any = None) -> Place:
        """Let the main thread begin nothing more; return the place of the last batch that it has begun."""
        with self._lock:
            self._is_held = True
            return self._failures.position[:2]

    # in a thread of its own

    def _decide(self, rank: int, signal: int) -> None:
        """Propose the furthest place. Others may propose, too: it's the same one, since no rank begins anything."""
        monitor, name = self._monitor, self._failures.name

        def furthest(begun: dict[int, list[int]]) -> Decision:
            # A process that has ended has ended its run before; if it hasn't, all ranks fail soon.
            ended = [one for one in range(monitor.num_ranks) if monitor.state_of(one) == "ended"]
            missing = tuple(one for one in range(monitor.num_ranks) if one not in {*begun, *ended})
            places = [*((trained, evaluated) for trained, evaluated in begun.values()), *(END for _ in ended)]
            return Decision(signal, rank, None if missing else max(places), missing)

        until = time.monotonic() + AGREE_WITHIN
        if monitor.arbiter != self._failures.rank:
            monitor.verdict(self._topic, wait=TAKE_OVER)
        decided, by, last, missing = monitor.settle(self._topic, furthest, within=until - time.monotonic())
        if last is None:  # some can't be reached: all ranks end, without a checkpoint
            more = "".join(f", nor {name(one)}" for one in missing[1:])
            what = (
                f"did not answer for {AGREE_WITHIN:g} s{more}: the ranks can't stop at the same step for "
                f"{name_of(decided)} on {name(by)}. Resume from a checkpoint that was saved before."
            )
            self._failures.fail_for(missing[0], what, code=exit_code_of(decided))


CHECKPOINT_NAME = "stopped.ckpt"
"""next to the files of the first `ModelCheckpoint`; the next one replaces it"""


def save(trainer: "pl.Trainer", finish: Callable[[], object], *, has_trained: bool) -> str:
    """Save a checkpoint, if there is something to save. Called by all ranks alike, between two batches.

    Args:
        trainer: whose run ends.
        finish: waits until the checkpoint is there.
        has_trained: whether a batch has been trained in this run.

    Returns:
        The message for the user.

    Raises:
        CheckpointError: the checkpoint can't be saved.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return "there is nothing to save"
    if not has_trained:
        return "no batch was trained since the start, so nothing is saved"
    callbacks: list[Any] = trainer.checkpoint_callbacks
    folders = (one.dirpath for one in callbacks if isinstance(one, ModelCheckpoint) and one.dirpath)
    folder = next(folders, None)
    if folder is None:
        return "nothing is saved, for the Trainer has no ModelCheckpoint"
    path = os.path.join(folder, CHECKPOINT_NAME)
    trainer.save_checkpoint(path)
    finish()
    return f"saved {path}; resume with ckpt_path={path!r}"


REQUEUE, INTERRUPTED = 75, 130


class StoppedBySignal(SIGTERMException):
    """The run was stopped by a signal. All ranks raise it after the same batch; it ends a script with code 75."""

    def __init__(self, report: str) -> None:
        super().__init__(REQUEUE)
        self.report = report
        """what was stopped, where, and what was saved"""


class Interrupted(KeyboardInterrupt):
    """The user has interrupted the run. All ranks raise it after the same batch."""

    def __init__(self, report: str) -> None:
        super().__init__(report)
        self.report = report
        """what was stopped, where, and what was saved"""


def exit_code_of(number: int) -> int:
    """The exit code of a run that the signal ends."""
    return INTERRUPTED if number == signal.SIGINT else REQUEUE


def name_of(number: int) -> str:
    """The name of a signal.

    Example:
        >>> name_of(15), name_of(99)
        ('SIGTERM', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
