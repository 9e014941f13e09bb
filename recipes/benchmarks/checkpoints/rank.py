"""Runs one rank of the checkpoint benchmark: saves in steps that compute, and loads what was saved.

plain    step step step step step step
sync     step step |   save   | step step
async    step step |copy| step step step step      a thread writes; longer steps, because it needs cores and the disk
"""

import ctypes
import gc
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.benchmarks.checkpoints.ways import Sizes, State, Way, all_ways
from recipes.benchmarks.harness import in_turn

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


STEPS_BEFORE, STEPS_AFTER = 3, 2
PRODUCT = 1024
"""rows and columns of the matrices that a step multiplies"""
NAMES = ("ours", "ours, async", "torch", "torch, async", "one file", "bytes alone")


@dataclass(frozen=True)
class Plan:
    """What all ranks run."""

    sizes: Sizes
    folder: Path
    num_rounds: int
    products: int
    """matrix products in a step"""


@dataclass(frozen=True)
class Save:
    """A save on one rank. Times are in seconds."""

    blocked: float
    """until training goes on"""
    whole: float
    """until the checkpoint is complete, to a step's length"""
    added: float
    """how much longer all steps took than as many ordinary ones"""
    step: float
    """an ordinary step"""
    memory: int
    """bytes above the state"""
    written: int
    """bytes in the folder"""


@dataclass(frozen=True)
class Load:
    """A load on one rank, from the disk and from the page cache. Times are in seconds."""

    cold: float
    warm: float
    memory: int
    equal: bool


@dataclass(frozen=True)
class RankRecord:
    """One rank's figures, by name and round."""

    saves: dict[str, list[Save]]
    loads: dict[str, list[Load]]
    num_bytes: int
    """of the rank's tensors"""


def run_all(rank: int, plan: Plan) -> RankRecord:
    """Run this rank: all ways in each round, each round beginning with another one."""
    state = State(plan.sizes, rank, dist.get_world_size())
    ways = all_ways()
    record = RankRecord({}, {}, state.num_bytes)
    for _, name in in_turn(NAMES, plan.num_rounds):
        _measure(name, ways[name], state, plan, record)
    return record


def _measure(name: str, way: Way, state: State, plan: Plan, record: RankRecord) -> None:
    path = plan.folder / name.replace(", ", "-")
    saving = _Saving(way, state, path, plan.products)
    record.saves.setdefault(name, []).append(saving.run())
    if "async" not in name:
        for kind in way.loads:
            found = _load(way, kind, state, path, saving.digest)
            record.loads.setdefault(f"{name}, {kind}".removesuffix(", "), []).append(found)
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


class _Saving:
    """Steps with a save among them. They go on until it is complete."""

    def __init__(self, way: Way, state: State, path: Path, products: int) -> None:
        self._way, self._state, self._path, self._products = way, state, path, products
        self._matrix, self._product = torch.eye(PRODUCT), torch.empty(PRODUCT, PRODUCT)
        self.digest = ""
        """of the values that are saved"""

    def run(self) -> Save:
        ordinary = median(self._step() for _ in range(STEPS_BEFORE))
        self.digest = self._state.digest()
        with PeakMemory() as memory:
            dist.barrier()
            begin = time.perf_counter()
            self._way.save(self._path, self._state.tensors)
            blocked = time.perf_counter() - begin
            steps, whole = self._steps_until_whole(begin)
            self._way.finish()
            took = time.perf_counter() - begin
        added = took - steps * ordinary
        return Save(blocked, whole or took, added, ordinary, memory.num_bytes, _size(self._path))

    def _steps_until_whole(self, begin: float) -> tuple[int, float]:
        """The number of steps, and the time when the first began after the save was complete."""
        whole, steps, left = 0.0, 0, STEPS_AFTER
        while left:
            if whole or self._is_whole():
                whole, left = whole or time.perf_counter() - begin, left - 1
            self._step()
            steps += 1
        return steps, whole

    def _step(self) -> float:
        """Compute, change the state, and meet the other ranks, as a training step does."""
        begin = time.perf_counter()
        self._way.poll()
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix, out=self._product)
        self._state.change()
        dist.all_reduce(torch.zeros(1))
        return time.perf_counter() - begin

    def _is_whole(self) -> bool:
        """Ask rank 0, so that all ranks run as many steps."""
        found: Tensor = torch.tensor(int(self._way.is_whole(self._path)))
        dist.broadcast(found, 0)
        return bool(found)


def _load(way: Way, kind: str, state: State, path: Path, digest: str) -> Load:
    times: list[float] = []
    equal = True
    with PeakMemory() as memory:
        for cold in (True, False):
            state.spoil()
            if cold:
                _drop_cache(path)
            dist.barrier()
            begin = time.perf_counter()
            way.load(path, state.tensors, kind)
            dist.barrier()
            times.append(time.perf_counter() - begin)
            equal &= state.digest() == digest
    cold_time, warm_time = times
    return Load(cold_time, warm_time, memory.num_bytes, equal)


def _drop_cache(path: Path) -> None:
    """Make the next read of these files come from the disk."""
    dist.barrier()
    if dist.get_rank() == 0 and hasattr(os, "posix_fadvise"):
        for file in _files(path):
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _size(path: Path) -> int:
    dist.barrier()
    return sum(file.stat().st_size for file in _files(path))


def _files(path: Path) -> Iterator[Path]:
    return (file for file in path.rglob("*") if file.is_file())
