"""Reads from a thread's Python stack what it is doing. Another thread reads it, so the one that works pays nothing.

A stack is a list of frames, the innermost first. Frames keep tensors and process groups alive: keep none.
"""

import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from lightning_hanayo.runtime import engine
from lightning_hanayo.runtime.capture.suspended_call import SuspendedCall
from lightning_hanayo.schedule import Kind

Stack = list[FrameType]

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
"""by the module of a frame"""
_KINDS = {
    Kind.F: "forward", Kind.B: "backward", Kind.I: "backward (of inputs)", Kind.W: "backward (of weights)",
}  # fmt: skip
_TRAINER = "lightning.pytorch.trainer.call"
"""the module whose outermost frame is the Trainer's start"""


def runs_trainer(thread: int) -> bool:
    """Whether the thread with that identity runs a function of a Trainer."""
    return bool(_trainer_starts(list(_outwards(sys._current_frames().get(thread)))))


def read_stack(thread: int) -> Stack:
    """The stack of the Trainer's thread with that identity, below the Trainer's own start; [] if it has ended.

    While it waits for a thread that runs a part of its work, the stack of that thread comes first: of a micro-batch's
    step, or of autograd's on a GPU.
    """
    stacks = sys._current_frames()
    if thread != threading.get_ident():
        del stacks[threading.get_ident()]  # a frame that holds itself would keep all others until gc runs
    stack = list(_outwards(stacks.get(thread)))
    starts = _trainer_starts(stack)
    stack = stack[: starts[-1]] if starts else stack
    for frame in stack:
        if frame.f_code is SuspendedCall._wait.__code__:
            stack = [*_outwards(stacks.get(frame.f_locals["self"].thread.ident)), *stack]
            break
    if stack and stack[0].f_code.co_name == "_engine_run_backward":
        python = {one.ident for one in threading.enumerate() if not isinstance(one, threading._DummyThread)}
        for other in stacks.keys() - python:
            stack = [*_outwards(stacks[other]), *stack]
    return stack


def _trainer_starts(stack: Stack) -> list[int]:
    return [index for index, frame in enumerate(stack) if name_of(frame)[0] == _TRAINER]


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


def doing(stack: Stack) -> tuple[str, tuple[str, int] | None]:
    """What a stack is doing, as "is in on_train_batch_start, model.py:31"; and that line's file and number.

    The line is the innermost one of the user's code, else of other packages, else of libraries.
    """
    if not stack:
        return "is in a thread that has ended", None
    activity = _activity(stack)
    others = [frame for frame in stack if not is_library(frame)]
    own = [frame for frame in others if "site-packages" not in frame.f_code.co_filename]
    if not others:
        return f"is {activity and activity + ', '}in {'.'.join(name_of(stack[0]))}", None
    frame = (own or others)[0]
    path, line = frame.f_code.co_filename, frame.f_lineno
    return f"is {activity and activity + ', '}in {frame.f_code.co_name}, {_short(path)}:{line}", (path, line)


def _activity(stack: Stack) -> str:
    """What the innermost code is about that is known: an action of the schedule, compilation, saving; "" for others."""
    for frame in stack:
        module, function = name_of(frame)
        if (module, function) == (engine.__name__, "_compute"):
            action = frame.f_locals["action"]
            return f"computing the {_KINDS[action.kind]} of stage {action.stage}, micro-batch {action.microbatch}"
        for prefix, activity in _ACTIVITIES.items():
            if module.startswith(prefix):
                return activity
    return ""


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
