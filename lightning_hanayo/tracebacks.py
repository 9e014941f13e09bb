"""Shows an error that ends a script without the frames of the engine: the user's own, and the message.

    train.py     trainer.fit(module)                  shown
    lightning    fit, _run, advance, closure, ...     hidden, as are those of torch and of this package
    train.py     training_step                        shown
    torch        linear                               shown if it is the last one: there the error was raised

An error stays whole if it is no user's mistake, and no user's code was called: it may be one of this package.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from traceback import FrameSummary, StackSummary, TracebackException
from types import TracebackType

import jsonargparse
import lightning
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_hanayo.errors import HanayoError, is_debugging, is_rank_zero

MISTAKES = (HanayoError, MisconfigurationException)
"""errors that the user can correct"""
_OWN = os.path.dirname(__file__) + os.sep
_FOLDERS = (os.path.dirname(str(package.__file__)) + os.sep for package in (lightning, torch, jsonargparse))
_ENGINE = (_OWN, *_FOLDERS, contextlib.__file__, threading.__file__)


_NO_DEVICE = ("No supported gpu backend found", "can not run on your system since the accelerator is not available")


def name_doctor(error: BaseException) -> None:
    """Add to Lightning's errors about accelerators how to look for the cause."""
    if isinstance(error, MisconfigurationException) and any(text in str(error) for text in _NO_DEVICE):
        error.add_note("`hanayo doctor` shows the build of torch and the devices that it finds.")


def install() -> None:
    """From now on uncaught errors that have passed through this package are shown so. All others are as before."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        name_doctor(error)
        is_other = not isinstance(error, Exception) or is_debugging()
        report = None if is_other else TracebackException(kind, error, traceback)
        if report is None or not any(frame.filename.startswith(_OWN) for frame in report.stack):
            before(kind, error, traceback)
        # before the launch all ranks find the same mistake
        elif dist.is_initialized() or not isinstance(error, MISTAKES) or is_rank_zero(os.environ):
            sys.stderr.write(shown(report, is_mistake=isinstance(error, MISTAKES)))

    sys.excepthook = show


def shown(report: TracebackException, *, is_mistake: bool) -> str:
    """The text of an error, which changes the report."""
    if is_mistake:  # the message says it all
        report.__cause__ = report.__context__ = None
    links, num_hidden = [report], 0
    for link in links:
        kept = _kept(list(link.stack), is_mistake=is_mistake)
        num_hidden += len(link.stack) - len(kept)
        link.stack = StackSummary.from_list(kept)
        links += [one for one in (link.__cause__, link.__context__) if one is not None]
    hint = f"({num_hidden} frames of the engine are hidden; HANAYO_DEBUG=1 shows them)\n"
    return "".join(report.format()) + hint * bool(num_hidden and not is_mistake)


def _kept(frames: Sequence[FrameSummary], *, is_mistake: bool) -> list[FrameSummary]:
    users = [index for index, frame in enumerate(frames) if not frame.filename.startswith(_ENGINE)]
    own = [index for index, frame in enumerate(frames) if frame.filename.startswith(_OWN)]
    last = len(frames) - 1
    if is_mistake:
        return [frames[index] for index in users]
    if own and not any(index > own[0] for index in users):  # no user code was called
        return list(frames)
    return [frames[index] for index in sorted({*users, last})]
