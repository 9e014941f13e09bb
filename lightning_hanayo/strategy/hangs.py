"""Watches whether a run makes progress. While it doesn't: a report of who waits for whom, again and again.

each rank         its monitor's thread looks once a second whether this rank makes progress, and answers what it does
lowest rank       no rank made progress for 15 s: asks all, and prints one report; again after each minute
                  where a run has gone on after a report it is only slow: the next one there comes after a minute
                  asks once more: if some ranks can never go on, the run ends; else it goes on, until `timeout`

A rank's own status is read from its stack, its counters and the Trainer's state.
"""

import linecache
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from lightning_hanayo.pipeline_parallel.transport import Transport
from lightning_hanayo.schedule import Action
from lightning_hanayo.strategy.failure import STOPPED_TIME, Failures
from lightning_hanayo.strategy.stacks import doing, find_wait, operations_done, read_stack
from lightning_hanayo.strategy.waits import Mismatch, Standstill, Status, find_mismatch, named, report, summary


@dataclass
class OwnStatus:
    """Reads the status of a rank, in any thread. Made in the thread that runs the Trainer.

    Args:
        rank: of this process.
        progress: returns a number that grows with all that the rank does.
        action: returns the action of the schedule that runs; None between batches.
        at: returns the step and the phase, as "step 12 (training)".
        transports: returns those of the run.
    """

    rank: int
    progress: Callable[[], int]
    action: Callable[[], Action | None]
    at: Callable[[], str]
    transports: Callable[[], Iterable[Transport]]
    _thread: int = field(default_factory=threading.get_ident, init=False)

    def read(self, still: float, channels: Collection[str] = ()) -> Status:
        """The status of this rank, which hasn't moved for so many seconds, and its operations on the channels.

        It holds no tensor and no process group.
        """
        progress, stack = self.progress(), read_stack(self._thread)
        wait = find_wait(self.rank, stack)
        text, source = doing(stack.frames, self.action())
        done = operations_done(self.rank, self.transports()) if channels else {}
        done = {channel: number for channel, number in done.items() if channel in channels}
        return Status(self.rank, progress, still, self.at(), wait, text, source, done)


_QUESTION = "hang status"
_REPORT = "hang report"
_ABSENT = {"stopped": "is stopped (SIGSTOP)", "ended": "has ended"}
"""by the monitor's state of a rank: why it gives no status"""
_OUTSIDE = "is outside of the Trainer's run"
_SILENT = "does not answer: it holds Python's lock (GIL), or its host is busy or can't be reached"


@dataclass(frozen=True)
class Limits:
    """Seconds: without a move until the first report, between two reports, and between two looks at this rank."""

    first: float = 15.0
    again: float = 60.0
    look: float = 1.0


LIMITS = Limits()


class HangWatch:
    """One rank's part in watching for hangs, for one run. Made in the thread that runs the Trainer.

    Args:
        failures: of the run: has the monitor, learns who holds this rank up, and ends the run.
        own: reads the status of this rank.
        timeout: how long a transfer may take; the report says so.
        limits: when it looks, and reports.
    """

    def __init__(self, failures: Failures, own: OwnStatus, timeout: timedelta, limits: Limits | None = None) -> None:
        self._failures, self._own, self._timeout, self._limits = failures, own, timeout, limits or LIMITS
        self._monitor = failures.monitor
        self._progress = -1
        self._is_finishing = False
        self._since = self._looked = self._next = time.monotonic()
        self._reported: set[frozenset[str]] = set()
        """the places of the ranks that held up the run when it was reported"""
        self._over = threading.Event()
        self._remove = [
            self._monitor.answer(_QUESTION, self._answer),
            self._monitor.on(_REPORT, self._hear),
            self._monitor.every(self._limits.look, self._look),
        ]

    def finish(self) -> None:
        """Training has ended on this rank. Watch its hooks that follow, until the Trainer returns: then `stop`."""
        self._is_finishing = True

    def stop(self) -> None:
        """Stop watching at once: the run has failed, or another one begins. A second call does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        for remove in self._remove:
            remove()
        self._monitor.answer(_QUESTION, lambda _: None)  # until the next run

    def _answer(self, channels: Collection[str] | None) -> object:
        still = time.monotonic() - self._since
        try:
            return asdict(self._own.read(still, channels or ()))
        except Exception as error:  # a rank that gives no answer would be taken for one that can't
            doing = f"can't say what it does: {error!r}"
            return asdict(Status(self._own.rank, self._progress, still, doing=doing))

    def _hear(self, _: int, blame: tuple[int, str]) -> None:
        rank, what = blame
        self._failures.held_up_by = rank, what

    def _look(self) -> None:
        """Called once a second in the monitor's thread. If that stood still, too, the process did: start anew."""
        now, progress, limits = time.monotonic(), self._own.progress(), self._limits
        if progress != self._progress or now - self._looked > limits.first / 3:
            self._progress, self._since, self._next = progress, now, now + limits.first
            self._failures.held_up_by = None
        self._looked = now
        if now >= self._next and self._failures.speaks and self._failures.first is None:
            self._next = now + limits.again
            threading.Thread(target=self._examine, daemon=True, name="hanayo-hang-report").start()

    def _examine(self) -> None:
        """Report, unless a rank makes progress. In a thread of its own, which may wait for answers."""
        before = self._ask([])
        if self._is_finishing and min(before.statuses, default=-1) != self._own.rank:
            return  # a lower one does it, or the Trainer has returned
        least = min((status.still for status in before.statuses.values()), default=0.0)
        if least < self._limits.first:
            self._next = time.monotonic() + self._limits.first - least
            return
        if self._over.wait(self._limits.look):
            return
        now = self._ask([status.wait.channel for status in before.statuses.values() if status.wait is not None])
        mismatch = find_mismatch(before, now)
        if self._over.is_set() or any(status.still < least for status in now.statuses.values()):
            return
        if mismatch is None and now.held_up_at in self._reported and least < self._limits.again:
            self._next = time.monotonic() + self._limits.again - least
        else:
            print(self._text(now, mismatch), file=sys.stderr, flush=True)
            self._reported.add(now.held_up_at)
        self._monitor.tell(_REPORT, [now.to_blame[0], summary(now, self._place, _source_lines(now))])
        if mismatch is not None:
            first, *others = mismatch.ranks
            self._failures.fail_for(first, f"can never go on, nor can {named(others)}: {mismatch.why}")

    def _ask(self, channels: Collection[str]) -> Standstill:
        answers = self._monitor.ask(_QUESTION, list(channels))
        statuses = {rank: Status.from_json(answer) for rank, answer in answers.items() if answer is not None}
        missing = [member.rank for member in self._monitor.members if member.rank not in statuses]
        absent = {rank: _OUTSIDE if rank in answers else _SILENT for rank in missing}
        absent |= {rank: _ABSENT[state] for rank in missing if (state := self._monitor.state_of(rank)) in _ABSENT}
        return Standstill(statuses, absent)

    def _place(self, rank: int) -> str:
        return self._monitor.members[rank].place

    def _text(self, now: Standstill, mismatch: Mismatch | None) -> str:
        still = min(status.still for status in now.statuses.values())
        at = next((status.at for status in now.statuses.values() if status.at), "")
        head = f"No progress for {still:.{0 if still >= 1 else 1}f} s{f' in {at}' if at else ''}."
        return "\n".join([head, *report(now, self._place, _source_lines(now)), self._what_follows(now, mismatch)])

    def _what_follows(self, now: Standstill, mismatch: Mismatch | None) -> str:
        if mismatch is not None:
            return f"The run ends, since {named(mismatch.ranks)} can never go on."
        if _ABSENT["stopped"] in now.absent.values():
            return f"The run ends {STOPPED_TIME:g} s after a rank was stopped, unless that is continued before."
        if set(now.absent.values()) <= {_OUTSIDE, _ABSENT["ended"]} and not any(
            status.wait for status in now.statuses.values()
        ):
            return "The run goes on: no rank waits for another one."
        return f"The run goes on. A rank that has waited for {self._timeout} (timeout) ends it."


def _source_lines(now: Standstill) -> dict[int, str]:
    """The source lines of the ranks that wait for nobody, if this machine has their files."""
    sources = {rank: now.statuses[rank].source for rank in now.idle if rank in now.statuses}
    return {rank: linecache.getline(*source).strip() for rank, source in sources.items() if source is not None}
