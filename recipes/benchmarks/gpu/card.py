"""The device that is measured: its name, its peak, its clock and its memory. A CPU stands in where there is no GPU."""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._C._autograd import DeviceType
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.overlap.link_queue import DeviceLink, LinkQueue, Work

PEAKS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A40": 150.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""TFLOP/s of bf16 matrix products without sparsity, from NVIDIA's data sheets; the first name that fits counts"""
_DRIVER = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class SleepingTransfer:
    """An emulated collective, which needs no core until it has ended."""

    end: float
    """on the machine's monotonic clock"""

    def wait(self) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, self.end - time.monotonic()))


@dataclass(frozen=True)
class StreamTransfer:
    """An emulated collective of a GPU."""

    ended: torch.cuda.Event

    def wait(self) -> None:
        """Let what is put into the current stream from now on wait for it; the host doesn't."""
        torch.cuda.current_stream().wait_event(self.ended)


class Card:
    """A device, on which one program runs at a time.

    This one is a CPU, which stands in at toy sizes. It has no kernels to count and nothing that spins, and it doesn't
    say how much memory tensors take.
    """

    peak: float | None = None
    """TFLOP/s of bf16 matrix products; None: not in the table"""

    def __init__(self) -> None:
        self.device, self.accelerator, self.compiler = torch.device("cpu"), "cpu", "aot_eager"
        self.name = platform.processor() or platform.machine()

    @property
    def about(self) -> str:
        """The device and its software, in words."""
        return f"no GPU: {self.name}, threads: {torch.get_num_threads()}"

    @property
    def capacity(self) -> int:
        """Bytes of memory."""
        return int(psutil.virtual_memory().total)

    @property
    def memory(self) -> int:
        """Bytes of tensors that exist."""
        return 0

    @property
    def peak_memory(self) -> int:
        """The most of them that have existed since `reset_peak`."""
        return 0

    def reset_peak(self) -> None:
        """Begin to look for a peak, once the device has nothing left to do."""

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""

    def kernels_of(self, run: Callable[[], None]) -> int:
        """How many kernels `run` launches."""
        run()
        return 0

    def peak_memory_of(self, run: Callable[[], None]) -> int:
        """The most bytes of tensors that exist while `run` runs, beyond those from before."""
        self.reset_peak()
        before = self.memory
        run()
        return self.peak_memory - before

    @contextmanager
    def spinning(self, num_blocks: int, seconds: float) -> Iterator[Callable[[], bool]]:
        """Let a kernel of `num_blocks` thread blocks spin; yields a function that says whether it still does."""
        yield lambda: True

    def link_queue(self) -> LinkQueue:
        """A queue for collectives of this device, as a cube's ranks have it."""
        return LinkQueue()

    def transfer(self, seconds: float) -> Work:
        """Start an emulated collective that takes so long, after those that were started before."""
        return SleepingTransfer(time.monotonic() + seconds)

    def seconds_of(self, run: Callable[[], None]) -> float:
        """The time that the kernels of `run` take."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


class GpuCard(Card):
    """The first NVIDIA GPU of this machine."""

    def __init__(self) -> None:
        self.device, self.accelerator, self.compiler = torch.device("cuda", 0), "gpu", "inductor"
        self.name = torch.cuda.get_device_name(self.device)
        self.peak = next((peak for part, peak in PEAKS.items() if part in self.name), None)

    @cached_property
    def _link(self) -> torch.cuda.Stream:
        """Carries emulated collectives, one after the other."""
        return torch.cuda.Stream(self.device)

    @property
    @override
    def about(self) -> str:
        driver = _DRIVER.read_text().strip() if _DRIVER.exists() else "version not found"
        properties = torch.cuda.get_device_properties(self.device)
        memory = f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs"
        return f"{self.name}, {memory}; driver {driver}, CUDA {torch.version.cuda}"

    @property
    @override
    def capacity(self) -> int:
        return torch.cuda.get_device_properties(self.device).total_memory

    @property
    @override
    def memory(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    @override
    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    @override
    def reset_peak(self) -> None:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)

    @override
    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @override
    def kernels_of(self, run: Callable[[], None]) -> int:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            run()
            self.synchronize()
        return sum(map(is_kernel, profile.events() or ()))

    @override
    @contextmanager
    def spinning(self, num_blocks: int, seconds: float) -> Iterator[Callable[[], bool]]:
        from recipes.benchmarks.gpu.spin import spin

        ended, stream = torch.cuda.Event(), torch.cuda.Stream(self.device)
        self.synchronize()
        if num_blocks:
            with torch.cuda.stream(stream):
                spin(num_blocks, seconds)
                ended.record()
            time.sleep(0.002)  # its blocks are on their SMs before anything else begins
        yield lambda: num_blocks == 0 or not ended.query()
        self.synchronize()

    @override
    def link_queue(self) -> LinkQueue:
        return DeviceLink()

    @override
    def transfer(self, seconds: float) -> Work:
        from recipes.benchmarks.gpu.spin import spin

        ended = torch.cuda.Event()
        self._link.wait_stream(torch.cuda.current_stream())  # a collective begins when what it sends is there
        with torch.cuda.stream(self._link):
            spin(1, seconds)
            ended.record()
        return StreamTransfer(ended)

    @override
    def seconds_of(self, run: Callable[[], None]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(1e-3 * start.elapsed_time(end))


def is_kernel(event: Any) -> bool:
    """Whether an event of torch's profiler is a kernel: not a copy, and not a range that a program has named."""
    on_device = event.device_type == DeviceType.CUDA and not event.is_user_annotation
    return on_device and not event.name.startswith(("Memcpy", "Memset"))


def find_card(*, toy: bool) -> Card:
    """The GPU; at toy sizes the CPU, if there is no GPU.

    Raises:
        UnsupportedError: there is no GPU, and the sizes are those of one.
    """
    if torch.cuda.is_available():
        return GpuCard()
    if toy:
        return Card()
    raise UnsupportedError("this benchmark needs an NVIDIA GPU, and torch finds none. --toy runs it on the CPU.")
