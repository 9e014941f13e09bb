"""Stacks of processes that can't answer, since they hold Python's lock (GIL): written at a signal, without that lock.

process a     faulthandler writes a's stack at a real-time signal to a file in memory, "hanayo-stack-<signal>"
process b     finds that file among /proc/<a>/fd, sends the signal, reads the file

On Linux only. No signal is sent to a process that has no such file, or has no handler for it now: it would end there.
"""

import faulthandler
import os
import re
import signal
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_NAME = "hanayo-stack-"
_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_LIBRARIES = tuple(
    str(Path(folder, *names))
    for folder, names in (
        (sysconfig.get_path("stdlib"), ()),
        *((sysconfig.get_path(kind), (name,)) for kind in ("purelib", "platlib") for name in ("torch", "lightning")),
        (str(Path(__file__).parents[2]), ()),
    )
)
_STEP = "suspended_call.py"
_REAL_TIME = range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if hasattr(signal, "SIGRTMAX") else range(0)


class StackLine(NamedTuple):
    """A frame of a stack."""

    path: str
    line: int
    function: str


def let_others_read() -> bool:
    """From now on other processes of this user can read this one's stack. Returns whether that works here.

    Called at the start of each run: a Trainer that ends sets all signals back to the handlers that Python knows, which
    doesn't include faulthandler's.
    """
    if (opened := _file()) is None:
        return False
    number, file = opened
    faulthandler.unregister(number)  # else it believes that it is still registered
    faulthandler.register(number, file=file, all_threads=True)
    return True


@cache
def _file() -> tuple[int, int] | None:
    """The signal that this process uses, and the file that it writes its stack to."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        number = next((number for number in _REAL_TIME if number not in _signals("Cgt", "Ign", "Blk")), None)
        return None if number is None else (number, os.memfd_create(f"{_NAME}{number}"))
    except OSError:  # there may be no /proc
        return None


def request_stack(pid: int) -> bool:
    """Let a process write its stack; returns whether it can. It takes some milliseconds until `read_stack` finds it."""
    found = _file_of(pid)
    if found is None:
        return False
    path, number = found
    try:
        if number not in _signals("Cgt", process=pid):
            return False
        os.truncate(path, 0)
        os.kill(pid, number)
    except OSError:
        return False
    return True


def read_stack(pid: int) -> StackLine | None:
    """The innermost line of the user's code in the stack that was requested; of a library if there is none."""
    found = _file_of(pid)
    try:
        return _line_in(found[0].read_bytes().replace(b"\0", b"").decode(errors="replace")) if found else None
    except OSError:
        return None


def _signals(*kinds: str, process: int | str = "self") -> set[int]:
    """The signals that a process catches (Cgt), ignores (Ign) or blocks (Blk), also from C code."""
    status = Path(f"/proc/{process}/status").read_text()
    masks = re.findall(rf"^Sig(?:{'|'.join(kinds)}):\s+(\w+)$", status, re.MULTILINE)
    return {number for number in signal.valid_signals() if any(int(mask, 16) >> (number - 1) & 1 for mask in masks)}


def _file_of(pid: int) -> tuple[Path, int] | None:
    try:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            _, found, number = os.readlink(file).partition(f"/memfd:{_NAME}")
            if found:
                return file, int(number.partition(" ")[0])
    except OSError:
        pass
    return None


def _line_in(text: str) -> StackLine | None:
    """The line in what faulthandler writes: a block for each thread, innermost frame first, main thread last."""
    blocks = [list(_frames(block)) for block in re.split(r"^(?=\S.*most recent call first)", text, flags=re.MULTILINE)]
    if not blocks or not blocks[-1]:
        return None
    main = blocks[-1]
    if any(frame.function == "_wait" and frame.path.endswith(_STEP) for frame in main):
        main = next(filter(_runs_step, blocks), main)
    return next((frame for frame in main if not frame.path.startswith(_LIBRARIES)), main[0])


def _frames(block: str) -> Iterator[StackLine]:
    for path, line, function in _FRAME.findall(block):
        yield StackLine(path, int(line), function)


def _runs_step(block: list[StackLine]) -> bool:
    """Whether it is the stack of a thread that runs the user's step, and isn't suspended."""
    functions = {frame.function for frame in block if frame.path.endswith(_STEP)}
    return "_work" in functions and "suspend" not in functions
