"""Measures how much memory this process takes at most above what it had before.

Pages of mapped files don't count: the kernel drops them when memory is short.
"""

import ctypes
import gc
import sys
import threading
from pathlib import Path
from types import TracebackType

INTERVAL_S = 0.004
_COUNTED = ("RssAnon:", "RssShmem:")


class PeakMemory:
    """A context in which a thread reads the memory of this process every few milliseconds (on Linux; 0 elsewhere)."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """the most above the start, so far"""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak memory", daemon=True)

    def __enter__(self) -> "PeakMemory":
        return_freed_memory()
        self._before = _resident()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.num_bytes = max(self.num_bytes, _resident() - self._before)


def return_freed_memory() -> None:
    """Give freed memory back to the system, so that its second use counts, too."""
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _resident() -> int:
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(_COUNTED))
