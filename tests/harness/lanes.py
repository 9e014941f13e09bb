"""Lanes: queues of work on a device for which the host doesn't wait. A lane can wait for a flag that is set later.

GPU    a CUDA stream, which waits for a value in memory as it would for a peer's data
CPU    a thread
"""

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override


class Lane(ABC):
    """A queue of work on a device that the host doesn't wait for."""

    @abstractmethod
    def follow_caller(self) -> None:
        """Start what is put into the lane from now on after what the caller has started on the device."""

    @abstractmethod
    def run(self, work: Callable[[], object]) -> None:
        """Put work into the lane."""

    @abstractmethod
    def raise_flag(self, flag: Any) -> None:
        """Let the lane set a flag."""

    @abstractmethod
    def await_flag(self, flag: Any) -> None:
        """Let the lane wait for a flag, which may not have been set on any device yet."""

    @abstractmethod
    def host_mark(self) -> Callable[[], object]:
        """A function that makes the host wait for what is in the lane now."""

    @abstractmethod
    def mark(self) -> Callable[[], object]:
        """A function that makes its caller's work on the device wait for what is in the lane now."""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Let the lane do nothing for a while."""

    @abstractmethod
    def close(self) -> None:
        """End the lane."""


class ThreadLane(Lane):
    """On the CPU: a thread."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lane")
        self._thread.start()

    def _run(self) -> None:
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                work()

    @override
    def follow_caller(self) -> None:
        """The caller's work on the CPU is done."""

    @override
    def run(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    @override
    def raise_flag(self, flag: threading.Event) -> None:
        self.run(flag.set)

    @override
    def await_flag(self, flag: threading.Event) -> None:
        self.run(lambda: flag.wait(self._timeout))

    @override
    def host_mark(self) -> Callable[[], object]:
        return self.mark()  # the caller's work is the host's

    @override
    def mark(self) -> Callable[[], object]:
        reached = threading.Event()
        self.run(reached.set)

        def wait() -> None:
            if not reached.wait(self._timeout):
                raise TimeoutError(f"a transfer did not end within {self._timeout} s")

        return wait

    @override
    def pause(self, seconds: float) -> None:
        self.run(lambda: time.sleep(seconds))

    @override
    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


class StreamLane(Lane):
    """On a GPU: a stream. It waits for flags as it would for a peer's data, without the host."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    @override
    def follow_caller(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())

    @override
    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream), torch.no_grad():
            work()

    @override
    def raise_flag(self, flag: Tensor) -> None:
        self.run(lambda: flag.fill_(1))

    @override
    def await_flag(self, flag: Tensor) -> None:
        wait_for_value(self.stream, flag, 1)

    @override
    def host_mark(self) -> Callable[[], object]:
        return self.stream.record_event().synchronize

    @override
    def mark(self) -> Callable[[], object]:
        event = self.stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)

    @override
    def pause(self, seconds: float) -> None:
        self.run(lambda: torch.cuda._sleep(int(seconds * 1.5e9)))  # type: ignore[no-untyped-call]  # cycles

    @override
    def close(self) -> None:
        """A stream belongs to torch's pool."""


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuStreamWaitValue32_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    driver.cuStreamWaitValue32_v2.restype = ctypes.c_int
    return driver


def wait_for_value(stream: torch.cuda.Stream, flag: Tensor, value: int) -> None:
    """Let the stream wait until `flag`, one int32 on the GPU or in pinned memory, is at least `value`."""
    at_least = 0  # CU_STREAM_WAIT_VALUE_GEQ
    code = _driver().cuStreamWaitValue32_v2(stream.cuda_stream, flag.data_ptr(), value, at_least)
    if code:
        raise RuntimeError(f"cuStreamWaitValue32 returned {code}: this driver lets no stream wait for a value")
