"""The machine: how one process of a benchmark is set up on it, and how well it sleeps."""

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
    """How a process wants to run.

    Args:
        realtime: ahead of all ordinary processes (SCHED_RR), so that others' work doesn't stretch what is measured.
        core: the one core it may use; None: any.
    """

    realtime: bool = True
    core: int | None = None

    def apply(self) -> str:
        """Apply them to this process, before it starts threads; say what came of it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the parent, which ends its children
        if sys.platform != "linux":
            return f"no priority or timer slack to set on {sys.platform}"
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a killed parent leaves nobody behind
        libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # sleeps end on time: 50 us late otherwise
        keep_memory()
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})
        return _realtime() if self.realtime else "ordinary priority"


def keep_memory() -> None:
    """Let glibc keep what is freed. Whether it gives pages back, and faults them in again in the next step, is luck.

    That luck is 2 % of a step or more, for any runtime, and changes from run to run.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, value in _MALLOC.items():
            mallopt(option, value)


_MALLOC = {-8: 1, -3: 1 << 25, -1: (1 << 31) - 1}
"""M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h: one heap, nothing mapped apart, nothing trimmed"""


def _realtime() -> str:
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError as error:
        return f"real-time priority refused ({error.strerror}); ordinary priority"
    return "real-time priority (SCHED_RR)"


def sleep_until(deadline: float) -> None:
    """What emulated devices do instead of computing, until `time.monotonic` is there. The same for all runtimes."""
    if (left := deadline - time.monotonic()) > 0:
        time.sleep(left)  # waiting awake for the last moment would be more exact, and keep gloo's threads from a core


def oversleep(seconds: float) -> float:
    """By how much a sleep of that length is late here, in seconds: the median of a few."""
    late = []
    for _ in range(TRIES):
        deadline = time.monotonic() + seconds
        sleep_until(deadline)
        late.append(time.monotonic() - deadline)
    return median(late)


def cores() -> list[int]:
    """The cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
