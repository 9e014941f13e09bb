"""Watches whether a run makes progress. While it doesn't: a report of who waits for whom, again and again.

each rank         its monitor's thread looks once a second whether this rank makes progress, and answers what it does
lowest rank       no rank made progress for 15 s: asks all, and prints one report; again after each minute
                  where a run has gone on after a report it is only slow: the next one there comes after a minute
                  asks once more: if some ranks can never go on, the run ends; else it goes on, until `timeout`

A rank's own status is read from its stack, its counters and the Trainer's state. A stack is a list of frames, the
innermost first. Another thread reads it, so the one that works pays nothing. Frames keep tensors and process groups
alive: keep none.

`find_wait` finds out what a rank waits for: a message, the other ranks of a collective, or nothing. Our own code states
its waits (`monitor/waiting.py`); calls of torch.distributed are found in the stack.
"""

import linecache
import os
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import takewhile
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist
from torch.autograd.graph import _engine_run_backward

from lightning_hanayo.monitor.waiting import Waiting, stated
from lightning_hanayo.pipeline_parallel.capture.threads import SuspendedCall
from lightning_hanayo.pipeline_parallel.engine import Engine
from lightning_hanayo.pipeline_parallel.object_collectives import Broadcast, numbers
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport, Transfer, Transport
from lightning_hanayo.schedule import Action, Kind
from lightning_hanayo.strategy import patches
from lightning_hanayo.strategy.failure import STOPPED_TIME, Failures
from lightning_hanayo.strategy.lightning import state
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.user_code import collectives
from lightning_hanayo.strategy.user_code.collectives import Agreement
from lightning_hanayo.strategy.waits import Mismatch, Standstill, Status, Wait, find_mismatch, named, report, summary

_LIBRARIES = {
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_hanayo", "torchmetrics",
    *sys.stdlib_module_names,
}  # fmt: skip
_ACTIVITIES = {
    "torch._dynamo": "compiling",
    "torch._inductor": "compiling",
    "lightning_hanayo.dist_checkpointing": "saving or loading a checkpoint",
    "lightning_hanayo.strategy.checkpoints": "saving or loading a checkpoint",
    "torch.utils.data.dataloader": "reading from its data loader",
}
"""by the beginning of the name of a frame's module"""
_KINDS = {
    Kind.F: "forward", Kind.B: "backward", Kind.I: "backward (of inputs)", Kind.W: "backward (of weights)",
}  # fmt: skip
_TRAINER = "lightning.pytorch.trainer.call"
"""the module whose outermost frame is the Trainer's start"""


class Stack(NamedTuple):
    """The frames of the Trainer's thread, below the Trainer's own start; none if it has ended.

    While it waits for a thread that runs a part of its work, the frames of that one come first: of a micro-batch's
    step, or of autograd's on a GPU.
    """

    threads: Sequence[int]
    """the identities of these threads"""
    frames: Sequence[FrameType]
    """the innermost one first"""


def read_stack(thread: int) -> Stack:
    """The stack of the Trainer's thread with that identity."""
    stacks = sys._current_frames()
    if thread != threading.get_ident():
        del stacks[threading.get_ident()]  # a frame that holds itself would keep all others until gc runs
    threads, frames = [thread], list(_outwards(stacks.get(thread)))
    starts = [index for index, frame in enumerate(frames) if name_of(frame)[0] == _TRAINER]
    frames = frames[: starts[-1]] if starts else frames
    for frame in frames:
        if frame.f_code is SuspendedCall.resume.__code__:
            step = frame.f_locals["self"].thread.ident
            threads, frames = [step, *threads], [*_outwards(stacks.get(step)), *frames]
            break
    if frames and frames[0].f_code is _engine_run_backward.__code__:
        python = {one.ident for one in threading.enumerate() if not isinstance(one, threading._DummyThread)}
        for other in stacks.keys() - python:
            threads, frames = [other, *threads], [*_outwards(stacks[other]), *frames]
    return Stack(threads, frames)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def name_of(frame: FrameType) -> tuple[str, str]:
    """The module and the function of a frame."""
    return str(frame.f_globals.get("__name__", "")), frame.f_code.co_name


def is_library(frame: FrameType) -> bool:
    """Whether its code is of Python, torch, Lightning or this package."""
    return name_of(frame)[0].partition(".")[0] in _LIBRARIES


def doing(frames: Sequence[FrameType], action: Action | None = None) -> str:
    """The activity of a stack, as "is in on_train_batch_start, model.py:31: time.sleep(3600)".

    The line is the innermost one of the user's code, else of other packages, else of libraries. `action`: of the
    schedule, that the rank runs.
    """
    if not frames:
        return "is in a thread that has ended"
    names = [name_of(frame)[0] for frame in frames]
    said = [f"{said}, " for name in names for prefix, said in _ACTIVITIES.items() if name.startswith(prefix)]
    if action is not None:
        said.append(f"computing the {_KINDS[action.kind]} of stage {action.stage}, micro-batch {action.microbatch}, ")
    activity = f"is {said[0] if said else ''}in"
    others = [frame for frame in frames if not is_library(frame)]
    own = [frame for frame in others if "site-packages" not in frame.f_code.co_filename]
    if not others:
        return f"{activity} {'.'.join(name_of(frames[0]))}"
    code, line = (own or others)[0].f_code, (own or others)[0].f_lineno
    relative, source = os.path.relpath(code.co_filename), linecache.getline(code.co_filename, line).strip()
    shown = code.co_filename if relative.startswith("..") else relative
    return f"{activity} {code.co_name}, {shown}:{line}" + f": {source}" * bool(source)


_TORCH = dist.distributed_c10d.__name__
WORLD = "collectives of all ranks"
"""the channel of the default process group"""
_MAKING_GROUPS = ("new_group", "split_group")
_MEETINGS = frozenset(
    ("barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single",
     "reduce_scatter", "reduce_scatter_tensor")
)  # fmt: skip
"""collectives that end on no rank before all ranks have come"""


def find_wait(rank: int, stack: Stack) -> Wait | None:
    """The wait of the rank with this stack; None if it runs user code, or computes."""
    if (own := stated(stack.threads)) is not None:
        return _stated(rank, own)
    wrappers = (collectives.__name__, patches.__name__)
    frames = [frame for frame in stack.frames if name_of(frame)[0] not in wrappers]
    for i, frame in enumerate(frames):
        if not is_library(frame):
            return None
        if name_of(frame)[0] == _TORCH:
            return _collective(frames[i:])
    other = stated()  # while it waits for its turn, the other action of a pair may wait for a collective
    return None if other is None else _stated(rank, other)


def _stated(rank: int, wait: Waiting) -> Wait | None:
    what, whom = wait.what, wait.whom
    if isinstance(whom, Transfer):
        received = "a message" if wait.outer is None else wait.outer.what
        what = "that it takes an earlier message" if whom.sends else received
        channel = _channel(rank, whom, counts_own=False)
        return Wait(str(what), (whom.peer,), channel, whom.number, (whom.peer,))
    if isinstance(whom, Broadcast):
        return Wait(str(what), (whom.source,), f"broadcasts in {whom.group}", whom.number, (whom.source,))
    if isinstance(whom, Agreement):
        return Wait(str(what), tuple(whom.ranks), channel=f"{whom.name} {whom.ranks[0]}")
    if isinstance(whom, tuple):
        return Wait(str(what), whom, channel=f"{what} {whom}")
    return None  # between two transfers


def operations_done(rank: int, transports: Iterable[Transport]) -> dict[str, int]:
    """How many operations a rank has started on each channel: messages, broadcasts, and collectives of the world."""
    started = (one for own in transports if isinstance(own, ProcessGroupTransport) for one in own.started)
    done = {_channel(rank, transfer, counts_own=True): transfer.number for transfer in started}
    done |= {f"broadcasts in {group.group_name}": number for group, number in list(numbers.items())}
    if (number := _world_number()) is not None:
        done[WORLD] = number
    return done


def _channel(rank: int, transfer: Transfer, *, counts_own: bool) -> str:
    """Names the channel on which the rank's own transfers are counted, or those of its peer that belong to them."""
    sender, receiver = (rank, transfer.peer) if transfer.sends else (transfer.peer, rank)
    counted = "sent" if transfer.sends == counts_own else "received"
    return f"{counted} {sender}>{receiver}, tag {transfer.tag} among {transfer.num_ranks}"


def _collective(frames: Sequence[FrameType]) -> Wait | None:
    """The collective of torch.distributed that these frames are in. None if the process group is gone."""
    torchs = list(takewhile(lambda frame: name_of(frame)[0].startswith("torch.distributed."), frames))
    outer, call = [frame for frame in torchs if name_of(frame)[0] == _TORCH][-1], frames[0].f_code.co_name
    name, world = outer.f_code.co_name, dist.group.WORLD
    if world is None:
        return None
    if name in _MAKING_GROUPS:
        ranks = tuple(outer.f_locals.get("ranks") or dist.get_process_group_ranks(world))
        return Wait("the making of a process group", ranks, channel=f"new group {ranks}")
    group = frames[0].f_locals.get("group") or world
    ranks = tuple(dist.get_process_group_ranks(group))
    place = doing(frames[len(torchs) :]).removeprefix("is ")
    what = f"{name} ({place})"
    if group is not world:
        return Wait(what, ranks, channel=group.group_name)
    return Wait(what, ranks, WORLD, _world_number() or 0, ranks if call in _MEETINGS else (), call)


def _world_number() -> int | None:
    """How many collectives this rank has started over gloo's world. Point-to-point messages have groups of their own.

    A host doesn't wait in collectives of other backends, so there the number says nothing.
    """
    world = dist.group.WORLD
    if world is None or dist.get_backend(world) != "gloo":
        return None
    return int(world._get_sequence_number_for_group())  # type: ignore[attr-defined]


class OwnStatus:
    """Reads the status of a rank in its run, in any thread. Made in the thread that runs the Trainer."""

    def __init__(self, run: Run) -> None:
        self._run, self._thread = run, threading.get_ident()
        self.rank = run.rank

    def progress(self) -> int:
        """A number that grows with all that the rank does."""
        engine = self._engine
        return self._run.guard.num_entered + (0 if engine is None else engine.num_steps)

    def read(self, still: float, channels: Collection[str] = ()) -> Status:
        """The status of this rank, which hasn't moved for so many seconds, and its operations on the channels.

        It holds no tensor and no process group.
        """
        run, engine = self._run, self._engine
        progress, stack, transports = self.progress(), read_stack(self._thread), [r.transport for r in run.relays]
        at, action = "set-up", None
        if engine is not None:
            at, action = state.place_in_run(run.trainer), engine.action
            transports.append(engine.channel.transport)
        wait = find_wait(self.rank, stack)
        text = doing(stack.frames, action)
        done = operations_done(self.rank, transports) if channels else {}
        done = {channel: number for channel, number in done.items() if channel in channels}
        return Status(self.rank, progress, still, at, wait, text, done)

    @property
    def _engine(self) -> Engine | None:
        """None before the model is set up."""
        return self._run.pipeline.engine if self._run.has_pipeline else None


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
        self._monitor.answer(_QUESTION, self._answer)
        self._remove = [
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
        self._failures.held_up_by = blame

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
        self._monitor.tell(_REPORT, [now.to_blame[0], summary(now, self._place)])
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
        return "\n".join([head, *report(now, self._place), self._what_follows(now, mismatch)])

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
