"""Lanes: queues of work on a device for which the host doesn't wait. A lane can wait for a flag that is set later.

GPU    a CUDA stream, which waits for a value in memory as it would for a peer's data
CPU    a thread

A thread of the host that takes part in transfers calls nothing of CUDA: the main thread may be inside of a call of CUDA
that waits for this transfer, and hold CUDA's lock. So lanes and such threads meet at numbers in memory (`Progress`).
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


class Progress(ABC):
    """How far a transfer is: a number that only grows, set and awaited by a lane and by a thread of the host."""

    @property
    @abstractmethod
    def value(self) -> int:
        """The latest number; 0 at first."""

    @abstractmethod
    def set(self, value: int) -> None:
        """Set it, in the calling thread."""

    @abstractmethod
    def set_in(self, lane: "Lane", value: int) -> None:
        """Let the lane set it."""

    @abstractmethod
    def await_in(self, lane: "Lane", value: int) -> None:
        """Let the lane wait until it is at least `value`."""

    def wait(self, value: int, timeout: float) -> None:
        """Wait in the calling thread until it is at least `value`, by looking every 20 us: that calls nothing of CUDA.

        Raises:
            TimeoutError: it wasn't within `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while self.value < value:
            if time.monotonic() > end:
                raise TimeoutError(f"a transfer didn't get from {self.value} to {value} within {timeout} s")
            time.sleep(2e-5)


class HostProgress(Progress):
    """For lanes that are threads."""

    def __init__(self, timeout: float) -> None:
        self._value, self._timeout = 0, timeout

    @property
    @override
    def value(self) -> int:
        return self._value

    @override
    def set(self, value: int) -> None:
        self._value = value

    @override
    def set_in(self, lane: "Lane", value: int) -> None:
        lane.run(lambda: self.set(value))

    @override
    def await_in(self, lane: "Lane", value: int) -> None:
        lane.run(lambda: self.wait(value, self._timeout))


class PinnedProgress(Progress):
    """For streams: one int32 in pinned memory, which both the GPU and the host read and write."""

    def __init__(self, word: Tensor) -> None:
        self._word = word
        self._host = ctypes.c_int32.from_address(word.data_ptr())
        self._host.value = 0

    @property
    @override
    def value(self) -> int:
        return self._host.value

    @override
    def set(self, value: int) -> None:
        self._host.value = value

    @override
    def set_in(self, lane: "Lane", value: int) -> None:
        assert isinstance(lane, StreamLane)
        _stream_operation("cuStreamWriteValue32_v2", lane.stream, self._word, value)

    @override
    def await_in(self, lane: "Lane", value: int) -> None:
        assert isinstance(lane, StreamLane)
        wait_for_value(lane.stream, self._word, value)


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
    return ctypes.CDLL("libcuda.so.1")


def _stream_operation(name: str, stream: torch.cuda.Stream, word: Tensor, value: int) -> None:
    function = getattr(_driver(), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    default = 0  # for waits: until the word is at least the value; for writes: after all earlier work
    if code := function(stream.cuda_stream, word.data_ptr(), value, default):
        raise RuntimeError(f"{name} returned {code}: this driver lets no stream do so")


def wait_for_value(stream: torch.cuda.Stream, word: Tensor, value: int) -> None:
    """Let the stream wait until `word`, one int32 on the GPU or in pinned memory, is at least `value`."""
    _stream_operation("cuStreamWaitValue32_v2", stream, word, value)
