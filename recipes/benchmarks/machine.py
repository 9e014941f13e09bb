"""Sets up a benchmark process (priority, core, memory, timer slack) and measures how precisely it sleeps."""

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from statistics import median

_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
TRIES = 40


@dataclass(frozen=True)
class ProcessOptions:
    """How a process should run.

    Args:
        realtime: ask for real-time priority (SCHED_RR), so that other programs don't stretch the measured times.
        core: pin the process to this core; None: any core.
    """

    realtime: bool = True
    core: int | None = None

    def apply(self) -> str:
        """Apply the options to this process, before it starts threads. Returns the priority it got, in words."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the parent, which ends its children
        if sys.platform != "linux":
            return f"no priority or timer slack to set on {sys.platform}"
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # end when the parent is killed
        libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # sleeps would end 50 us late otherwise
        keep_memory()
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})
        return _realtime() if self.realtime else "ordinary priority"


def keep_memory() -> None:
    """Let glibc keep freed memory.

    Otherwise it returns pages in some runs and faults them in again in the next step, which changes a step by 2 % or
    more in any runtime.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, value in _MALLOC.items():
            mallopt(option, value)


_MALLOC = {-8: 1, -3: 1 << 25, -1: (1 << 31) - 1}
"""M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h: one heap, no separate mappings, no trimming"""


def _realtime() -> str:
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError as error:
        return f"real-time priority refused ({error.strerror}); ordinary priority"
    return "real-time priority (SCHED_RR)"


def sleep_until(deadline: float) -> None:
    """Sleep until `time.monotonic` reaches `deadline`, as all emulated devices do instead of computing."""
    if (left := deadline - time.monotonic()) > 0:
        time.sleep(left)  # a busy wait would be more exact, but would take a core from gloo's threads


def oversleep(seconds: float) -> float:
    """How much too late a sleep of `seconds` ends, in seconds: the median of several."""
    late = []
    for _ in range(TRIES):
        deadline = time.monotonic() + seconds
        sleep_until(deadline)
        late.append(time.monotonic() - deadline)
    return median(late)


def cores() -> list[int]:
    """The cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
