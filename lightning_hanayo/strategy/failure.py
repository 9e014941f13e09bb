"""When a rank fails, all ranks agree on the first failure; the others end soon and quietly, and one line says why.

rank 2    KeyError in its step      publish    --+
rank 1    "connection closed"       waits: no cause of its own
rank 0    sees that 3 was killed    proposes   --+-->  the monitors' verdict: the first of them, the same on all ranks

verdict, rank 2: KeyError           rank 2 shows its traceback; the others end with `PeerFailed`
verdict, rank 3 was killed          the rank that has seen it prints the line; all end with `PeerFailed`
3 s later                           ranks that still run end themselves; stopped ones were ended by a rank of their host
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _abort_process_group, _get_default_store

from lightning_hanayo.errors import PeerFailed, with_notes
from lightning_hanayo.monitor.monitor import Monitor
from lightning_hanayo.monitor.processes import Member, lost_parent
from lightning_hanayo.monitor.waiting import Waiting
from lightning_hanayo.strategy.joining import close_monitor, forget_monitor, is_lost_connection, what_was_lost
from lightning_hanayo.tracebacks import MISTAKES

_ENDED = (1 << 62, 0, 0, 0)
_WITHOUT_TRACEBACK = (SystemExit, KeyboardInterrupt)
"""raised by user code to end its process: neither Python nor Lightning shows where"""
PAUSE = 0.05
"""seconds without Python's lock at the end of a process"""
GRACE = 3.0
"""seconds that a rank has to end by itself once another has failed; gloo wakes no rank whose peer is still alive"""
CAUSE_TIME = 2.0
"""seconds that a rank whose connection was lost waits for the cause"""
STOPPED_TIME = 15.0
"""seconds that a process may be stopped (SIGSTOP, SIGTSTP) while others wait for it"""
_TO_TELL = 0.5
"""seconds in which a message reaches all ranks"""
_LONGEST = 10_000
"""characters of a cause that other ranks get"""


@dataclass(frozen=True)
class Failure:
    """The first failure: the rank, the cause, the exit code of the ranks that end because of it.

    Args:
        rank: the one that has failed.
        message: the cause, with the rank's name.
        code: of the other ranks.
        by: the rank that says so.
        is_shown: whether the failed rank shows it itself; otherwise the one that says so does.
    """

    rank: int
    message: str
    code: int
    by: int
    is_shown: bool

    def follow(self) -> NoReturn:
        """End without a traceback.

        Raises:
            PeerFailed: always.
        """
        raise PeerFailed(self.message, self.code) from None


_left: dict[tuple[str, int], tuple[Store, int]] = {}
"""for the address of a rendezvous: the store that all ranks have there, and how many groups this process has left after
a failure. The process group belongs to the whole process, and so does this."""


def leave_group(address: tuple[str, int]) -> None:
    """After a failure: leave the process group without waiting for other ranks.

    The store stays: rank 0 serves it to the others, and the next group of these processes meets there, too. NCCL
    would wait for its kernels, of which some wait for other ranks, so all but gloo is aborted.
    """
    forget_monitor()
    if dist.is_initialized():
        store, count = _left.get(address, (_get_default_store(), 0))
        _left.clear()
        _left[address] = store, count + 1
        leave = dist.destroy_process_group if dist.get_backend() == "gloo" else _abort_process_group
        leave()


def leave_at_exit() -> None:
    """When the process ends and nothing has failed: torch warns of NCCL groups that are still there."""
    close_monitor()
    if dist.is_initialized():
        dist.destroy_process_group()


def pause_at_exit() -> None:
    """When the process ends: let gloo's threads release the memory of their last collectives.

    They need Python's lock for it. One that waits for the lock while the interpreter ends aborts the process, which has
    happened in one of 25 runs on a busy machine: a run that had succeeded ended with signal 6 (pytorch #179291).
    """
    close_monitor()
    time.sleep(PAUSE)


def store_after_failure(address: tuple[str, int]) -> Store | None:
    """Where the next process group meets, apart from the keys of those before; None: as usual."""
    store, count = _left.get(address, (None, 0))
    return None if store is None else PrefixStore(f"hanayo/after_failure_{count}", store)


class Failures:
    """One rank's view of the failures of one run. Made on all ranks, once their monitors are linked.

    Args:
        rank: this process's.
        monitor: this rank's.
        abort: called in a thread when another rank has failed: ends this rank's waiting for a GPU, whose kernels wait
            for that rank. gloo needs nothing: it ends transfers when a connection is closed.
    """

    def __init__(self, rank: int, monitor: Monitor, abort: Callable[[], object]) -> None:
        self.rank, self.monitor = rank, monitor
        self.position: tuple[int, int, int, int]
        """how far this rank is, for others that wait for it: the same on all ranks that keep step, and it only grows.
        Batches of training, and of evaluation since then; hooks and steps that have ended since then"""
        self.held_up_by: tuple[int, str] | None = None
        """if this rank stands still and it is known why: the rank that holds it up, and its activity"""
        self.store = _get_default_store()
        """the one rendezvous all ranks have; torch offers it under no public name"""
        self._over = threading.Event()
        monitor.answer("position", self._position_in)
        self.begin(abort)

    def begin(self, abort: Callable[[], object]) -> None:
        """Begin a run, or after one something else that all ranks do together."""
        self.run = next(self.monitor.run_numbers)
        self.position = (0, 0, 0, 0)
        self._abort: Callable[[], object] | None = abort
        self._topic = f"first failure in run {self.run}"
        self._over.clear()
        self._remove = [
            self.monitor.on("verdict", self._on_verdict),
            self.monitor.on("state", lambda *_: self._look_at_processes()),
            self.monitor.every(1.0, self._look_at_processes),
        ]

    def publish(self, error: BaseException) -> Failure:
        """Record that this rank fails with `error`; return the first failure of all ranks.

        An error that only says that a connection was lost has a cause elsewhere, which comes soon.
        """
        rank, code, is_shown = self.rank, 1, False
        if is_lost_connection(error):
            first = self.monitor.verdict(self._topic, wait=CAUSE_TIME)
            if first is not None:
                return Failure(**first)
            message = f"{self.name(rank)} has lost a connection, or waited in vain: {what_was_lost(error)}"
            if self.held_up_by is not None:
                rank, cause = self.held_up_by
                message = f"{cause}; {message}"
        elif isinstance(error, _WITHOUT_TRACEBACK):
            message = f"{self.name(rank)} left the run: {error!r}"
            if isinstance(error, SystemExit) and isinstance(error.code, int):
                code = error.code or 1
        else:
            message = f"{self.name(rank)}: {type(error).__name__}: {with_notes(error)}"
            code, is_shown = 2 if isinstance(error, MISTAKES) else 1, True
        own = Failure(rank, message[:_LONGEST], code, self.rank, is_shown)
        return Failure(**self.monitor.decide(self._topic, asdict(own)))

    def on_transfer(self, error: Exception) -> NoReturn:
        """Called when a transfer failed: end quietly if another rank failed first, else record the error and raise it.

        Raises:
            PeerFailed: another rank failed first, or the error says no more than that another one doesn't answer.
            RuntimeError: none did; the transfer's own error.
        """
        self.explain(error)
        raise error

    def explain(self, error: BaseException) -> None:
        """Record why this rank's run ends with `error`.

        Raises:
            PeerFailed: the error is a consequence of another rank's failure, which that rank shows.
        """
        if isinstance(error, PeerFailed) or getattr(error, "failed_first", False):
            return
        first = self.publish(error)
        if isinstance(error, _WITHOUT_TRACEBACK):
            return  # each rank that leaves does so with its own exit code
        if first.rank != self.rank or not first.is_shown:
            first.follow()
        error.failed_first = True  # type: ignore[attr-defined]
        if self.monitor.num_ranks > 1 and not isinstance(error, MISTAKES):
            error.add_note(f"This was on {self.name(self.rank)}.")

    def check_peers(self) -> None:
        """Look whether another rank has failed.

        Raises:
            PeerFailed: one has.
        """
        first = self.first
        if first is not None and first.rank != self.rank:
            first.follow()

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. All ranks call it once in a run, with values that JSON can hold.

        Raises:
            PeerFailed: a rank has failed.
        """
        ranks = range(self.monitor.num_ranks)
        return meet(self, f"hanayo/{name}/{self.run}", ranks, value, Waiting(name, tuple(ranks)), self.check_peers)

    @property
    def first(self) -> Failure | None:
        """The first failure of all ranks, if one has failed."""
        verdict = self.monitor.verdict(self._topic)
        return None if verdict is None else Failure(**verdict)

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for all: the lowest one that runs, and whose run has not ended."""
        ranks = (rank for rank in range(self.monitor.num_ranks) if rank not in self._finished)
        return self.rank == next((rank for rank in ranks if self.monitor.state_of(rank) == "running"), self.rank)

    def name(self, rank: int) -> str:
        """The rank with its place, for messages."""
        return f"rank {rank} ({self.monitor.members[rank].place})"

    def fail_for(self, rank: int, what: str, *, code: int = 1) -> None:
        """Let all ranks end because of this one. `what` has happened to it, put after its name. Returns at once."""
        failure = Failure(rank, f"{self.name(rank)} {what}", code, self.rank, is_shown=False)
        self.monitor.propose(self._topic, asdict(failure))

    def watch_parent(self, name: str) -> None:
        """Let all ranks end when the process ends that has started this one, which is called `name`."""

        def look() -> None:
            if (parent := lost_parent()) is not None:
                self.fail_for(self.rank, f"was started by {name}, process {parent}, which has ended")

        self._remove.append(self.monitor.every(1.0, look))

    def positions(self) -> dict[int, tuple[int, ...]]:
        """How far the ranks are that answer, or whose run is over; () before one has begun this run."""
        answers = self.monitor.ask("position", self.run)
        over = dict.fromkeys(self._finished, _ENDED)
        return {rank: tuple(position) for rank, position in answers.items()} | over

    def end_hook(self) -> None:
        """Called after a hook of the user's module that runs on all ranks, and before the steps of a batch."""
        trained, evaluated, hooks, _ = self.position
        self.position = (trained, evaluated, hooks + 1, 0)

    def end_step(self) -> None:
        """Called when a step has ended or is suspended."""
        trained, evaluated, hooks, steps = self.position
        self.position = (trained, evaluated, hooks, steps + 1)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended on this rank."""
        return self._over.is_set()

    def stop(self) -> None:
        """Stop watching: the run has ended on this rank. Again: do nothing."""
        if self.is_over:
            return
        self.position = _ENDED
        self._over.set()
        self._abort = None  # it holds the process groups
        for remove in self._remove:
            remove()
        self.monitor.tell("run over", self.run)

    def leave(self) -> None:
        """After `stop` in a failed run: close the monitor, once the ranks of this host have ended or left, too.

        Those that can't within `GRACE`, because they hold the interpreter's lock, are killed.
        """
        if self.monitor.num_ranks > 1:
            leaving = threading.Thread(target=self._leave, daemon=True, name="hanayo-leave-run")
            leaving.start()
            atexit.register(leaving.join, 2 * GRACE)
        else:
            self.monitor.close()

    def _leave(self) -> None:
        deadline = time.monotonic() + GRACE + 1.0  # by then they have ended themselves
        while self._still_running and time.monotonic() < deadline:
            time.sleep(0.02)
        self._kill()
        self.monitor.close()

    def _kill(self, *, only_stopped: bool = False) -> None:
        """End the processes of this host whose run has not ended, because they can't end themselves."""
        for member in self._still_running:
            # It must be the process that has joined the run, and none that has got its number since.
            if member.exists and (member.is_stopped or not only_stopped):
                with suppress(OSError):
                    os.kill(member.pid, signal.SIGKILL)

    @property
    def _still_running(self) -> list[Member]:
        """Processes of this host whose run has not ended."""
        beside = [one for one in self.monitor.members if one.is_beside(self.monitor.member)]
        gone = {one.rank for one in beside if self.monitor.state_of(one.rank) == "ended"} | self._finished
        return [one for one in beside if one.rank not in gone]

    def _position_in(self, run: Any) -> tuple[int, ...]:
        return self.position if run == self.run else ()

    @property
    def _finished(self) -> set[int]:
        """Ranks whose run has ended."""
        return {rank for rank, run in self.monitor.runs_over.copy().items() if run >= self.run}

    def _look_at_processes(self) -> None:
        """A process that ends without having failed or finished is a failure; so is one that stays stopped."""
        now = time.monotonic()
        for rank in set(range(self.monitor.num_ranks)) - self._finished - {self.rank}:
            peer = self.monitor.peer(rank)
            if peer.state == "ended" and (peer.reason or now - peer.since > 1.0):
                self.fail_for(rank, peer.reason or "ended while others still ran")
            elif peer.state == "stopped" and now - peer.since > STOPPED_TIME:
                self.fail_for(rank, f"was stopped (SIGSTOP or SIGTSTP) {STOPPED_TIME:g} s ago")

    def _on_verdict(self, _: int, content: Any) -> None:
        if content["topic"] != self._topic:
            return
        first = Failure(**content["verdict"])
        if first.by == self.rank:
            if not first.is_shown:
                print(first.message, file=sys.stderr, flush=True)
            self._kill(only_stopped=True)
        if first.rank != self.rank or not first.is_shown:
            threading.Thread(target=self._end, args=(first,), daemon=True, name="hanayo-end-run").start()

    def _end(self, first: Failure) -> None:
        if self._abort is not None:
            self._abort()
        self._over.wait(_TO_TELL)  # Linux ends with rank 0 the ranks that it has started, also one that is to say why
        self._kill(only_stopped=True)
        if not self._over.wait(GRACE - _TO_TELL):
            late = f"rank {self.rank} did not end within {GRACE:g} s after rank {first.rank} failed; ending it"
            print(late, file=sys.stderr, flush=True)
            self.monitor.tell("run over", self.run)  # all that can do the same now
            time.sleep(_TO_TELL)
            self._kill()
            os._exit(first.code)


def meet(
    failures: Failures, key: str, ranks: Sequence[int], value: Any, waiting: Waiting, look: Callable[[], None]
) -> list[Any]:
    """The values of these ranks, in their order, which JSON can hold. Each of them calls it once with this key.

    Through the store: unlike a collective, it can be left when a rank fails. `look` is called while the rank waits.
    """
    store, pause = failures.store, 1e-4
    try:
        store.set(f"{key}/{failures.rank}", json.dumps(value))
        if store.add(f"{key}/arrived", 1) == len(ranks):
            store.set(f"{key}/all", json.dumps([json.loads(store.get(f"{key}/{rank}")) for rank in ranks]))
        with waiting:
            while not store.check([f"{key}/all"]):
                look()
                time.sleep(pause)
                pause = min(1.5 * pause, 2e-3)
        values: list[Any] = json.loads(store.get(f"{key}/all"))
    except RuntimeError as error:
        failures.on_transfer(error)
    return values
