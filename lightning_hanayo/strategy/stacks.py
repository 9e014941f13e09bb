"""Reads from a thread's Python stack what it is doing. Another thread reads it, so the one that works pays nothing.

A stack is a list of frames, the innermost first. Frames keep tensors and process groups alive: keep none.

Finds out what this rank waits for: a message, the other ranks of a collective, or nothing.

Our own code states its waits (`monitor/waiting.py`). Calls of torch.distributed are found in the stack.
"""

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist
from torch.autograd.graph import _engine_run_backward

from lightning_hanayo.monitor.waiting import Waiting, stated
from lightning_hanayo.pipeline_parallel.capture.threads import SuspendedCall
from lightning_hanayo.pipeline_parallel.comm.object_collectives import Broadcast, numbers
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport, Transfer, Transport
from lightning_hanayo.schedule import Action, Kind
from lightning_hanayo.strategy import patches
from lightning_hanayo.strategy.user_code import collectives
from lightning_hanayo.strategy.user_code.collectives import Agreement
from lightning_hanayo.strategy.waits import Wait

_LIBRARIES = {
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_hanayo", "torchmetrics",
    *sys.stdlib_module_names,
}  # fmt: skip
_ACTIVITIES = {
    "torch._dynamo": "compiling",
    "torch._inductor": "compiling",
    "lightning_hanayo.dist_checkpointing.save": "saving a checkpoint",
    "lightning_hanayo.dist_checkpointing.commit": "saving a checkpoint",
    "lightning_hanayo.dist_checkpointing.target": "saving a checkpoint",
    "lightning_hanayo.dist_checkpointing.plain_file": "saving a checkpoint",
    "lightning_hanayo.strategy.checkpoints.save": "saving a checkpoint",
    "lightning_hanayo.strategy.checkpoints.parts": "saving a checkpoint",
    "lightning_hanayo.dist_checkpointing.folder": "loading a checkpoint",
    "lightning_hanayo.dist_checkpointing.load_state": "loading a checkpoint",
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
    starts = _trainer_starts(frames)
    frames = frames[: starts[-1]] if starts else frames
    for frame in frames:
        if frame.f_code is SuspendedCall._wait.__code__:
            step = frame.f_locals["self"].thread.ident
            threads, frames = [step, *threads], [*_outwards(stacks.get(step)), *frames]
            break
    if frames and frames[0].f_code is _engine_run_backward.__code__:
        python = {one.ident for one in threading.enumerate() if not isinstance(one, threading._DummyThread)}
        for other in stacks.keys() - python:
            threads, frames = [other, *threads], [*_outwards(stacks[other]), *frames]
    return Stack(threads, frames)


def _trainer_starts(frames: Sequence[FrameType]) -> list[int]:
    return [index for index, frame in enumerate(frames) if name_of(frame)[0] == _TRAINER]


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


def doing(frames: Sequence[FrameType], action: Action | None = None) -> tuple[str, tuple[str, int] | None]:
    """The activity of a stack, as "is in on_train_batch_start, model.py:31"; and that line's file and number.

    The line is the innermost one of the user's code, else of other packages, else of libraries. `action`: of the
    schedule, that the rank runs.
    """
    if not frames:
        return "is in a thread that has ended", None
    activity = _activity(frames, action)
    others = [frame for frame in frames if not is_library(frame)]
    own = [frame for frame in others if "site-packages" not in frame.f_code.co_filename]
    if not others:
        return f"is {activity and activity + ', '}in {'.'.join(name_of(frames[0]))}", None
    frame = (own or others)[0]
    path, line = frame.f_code.co_filename, frame.f_lineno
    return f"is {activity and activity + ', '}in {frame.f_code.co_name}, {_short(path)}:{line}", (path, line)


def _activity(frames: Sequence[FrameType], action: Action | None) -> str:
    """The kind of activity: compilation, saving; else an action of the schedule; "" for other code."""
    for frame in frames:
        for prefix, activity in _ACTIVITIES.items():
            if name_of(frame)[0].startswith(prefix):
                return activity
    if action is None:
        return ""
    return f"computing the {_KINDS[action.kind]} of stage {action.stage}, micro-batch {action.microbatch}"


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


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
    done = {
        _channel(rank, transfer, counts_own=True): transfer.number
        for transport in transports
        if isinstance(transport, ProcessGroupTransport)
        for transfer in transport.started
    }
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
    place = doing(frames[len(torchs) :])[0].removeprefix("is ")
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
