"""Reads from a thread's Python stack what it is doing. Another thread reads it, so the one that works pays nothing.

A stack is a list of frames, the innermost first. Frames keep tensors and process groups alive: keep none.
"""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NamedTuple

from torch.autograd.graph import _engine_run_backward

from lightning_hanayo.runtime.capture.suspended_call import SuspendedCall
from lightning_hanayo.schedule import Action, Kind

_LIBRARIES = {
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_hanayo", "torchmetrics",
    *sys.stdlib_module_names,
}  # fmt: skip
_ACTIVITIES = {
    "torch._dynamo": "compiling",
    "torch._inductor": "compiling",
    "lightning_hanayo.checkpoint.save": "saving a checkpoint",
    "lightning_hanayo.strategy.checkpoints.saving": "saving a checkpoint",
    "lightning_hanayo.checkpoint.load": "loading a checkpoint",
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


def runs_trainer(thread: int) -> bool:
    """Whether the thread with that identity runs a function of a Trainer."""
    return bool(_trainer_starts(list(_outwards(sys._current_frames().get(thread)))))


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
    """What a stack is doing, as "is in on_train_batch_start, model.py:31"; and that line's file and number.

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
    """What the code is about: compilation, saving; else an action of the schedule; "" for other code."""
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
