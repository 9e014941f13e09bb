"""Finds the processes of a drill, and kills one, or those that are left. Reads /proc, so it needs Linux."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from recipes.resume_drill.train import PIDS

MARKER = "RESUME_DRILL"
"""a variable in the environment of all processes of a drill"""


def rank_process(folder: Path, rank: int, mark: str) -> int | None:
    """The process id of a rank that has started and still runs."""
    with suppress(OSError, ValueError):
        pid = int((folder / PIDS / str(rank)).read_text())
        return pid if _belongs(pid, mark) else None
    return None


def kill(pid: int) -> None:
    """Kill it as the kernel does when there is no memory left: it has no time to say anything."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def left(mark: str) -> list[int]:
    """The ids of all processes of a drill that still run."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _belongs(int(path.name), mark)]


def _belongs(pid: int, mark: str) -> bool:
    """Whether a process runs and is of this drill; the environment of a zombie is empty."""
    with suppress(OSError):
        return f"{MARKER}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False
