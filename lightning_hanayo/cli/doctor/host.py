"""The host: processor cores, memory, the container's limits, shared memory, and limits of processes."""

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_hanayo.cli.doctor.finding import GIB, Finding, gibibytes

_TOPIC = "host"
_UNLIMITED = -1
_FEW_FILES = 1024


@dataclass(frozen=True)
class Limits:
    """What this process may use. None: there is no such limit, or it isn't known."""

    cores: int
    """that it may run on"""
    quota: float | None
    """of processor time, in cores"""
    memory: int | None
    """bytes of the host that are available"""
    group_memory: int | None
    """bytes that its control group leaves it"""
    shared: int | None
    """bytes of /dev/shm"""
    open_files: int
    locked: int
    """bytes that it may lock in memory"""
    has_infiniband: bool = False


def look(root: Path = Path("/")) -> Limits:
    """Ask the operating system.

    Args:
        root: above sys, proc and dev.
    """
    shared = root / "dev/shm"
    return Limits(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota=_quota(root),
        memory=_available(root),
        group_memory=_left_in_group(root),
        shared=shutil.disk_usage(shared).total if shared.is_dir() else None,
        open_files=_soft(resource.RLIMIT_NOFILE),
        locked=_soft(resource.RLIMIT_MEMLOCK),
        has_infiniband=any((root / "sys/class/infiniband").glob("*")),
    )


def examine(limits: Limits) -> Iterator[Finding]:
    """What a run on this host is to know."""
    quota = limits.cores if limits.quota is None else limits.quota
    text = f"{limits.cores}" if quota >= limits.cores else f"{limits.cores}, of which a quota allows {quota:g}"
    advice = f"no more than {quota:g} threads run at once: OMP_NUM_THREADS times the number of ranks"
    yield Finding(_TOPIC, "cores", text).flagged_if(quota < limits.cores, "note", advice)
    yield from _memory(limits)
    if limits.shared is not None:
        advice = "loaders with num_workers > 0 need more: docker run --shm-size=8g, or --ipc=host"
        yield Finding(_TOPIC, "/dev/shm", gibibytes(limits.shared)).flagged_if(limits.shared < GIB, "note", advice)
    yield _open_files(limits.open_files)
    if limits.has_infiniband and _UNLIMITED < limits.locked < GIB:
        advice = "ulimit -l unlimited: InfiniBand locks the memory that it sends from"
        yield Finding(_TOPIC, "locked memory", gibibytes(limits.locked), "problem", advice)


def _memory(limits: Limits) -> Iterator[Finding]:
    free = [one for one in (limits.memory, limits.group_memory) if one is not None]
    if not free:
        return
    by_group = limits.group_memory is not None and limits.group_memory == min(free)
    text = f"{gibibytes(min(free))} available{' in its control group' if by_group else ''}"
    advice = "end other processes, or give the container more memory"
    yield Finding(_TOPIC, "memory", text).flagged_if(min(free) < GIB, "problem", advice)


def _open_files(limit: int) -> Finding:
    text = "unlimited" if limit == _UNLIMITED else str(limit)
    advice = "ulimit -n 65536: each rank opens a socket to each other one"
    return Finding(_TOPIC, "open files", text).flagged_if(_UNLIMITED < limit < _FEW_FILES, "note", advice)


def _soft(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _quota(root: Path) -> float | None:
    text = _text(root / "sys/fs/cgroup/cpu.max").split()
    return int(text[0]) / int(text[1]) if len(text) == 2 and text[0].isdigit() else None


def _left_in_group(root: Path) -> int | None:
    most, used = (_text(root / f"sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return int(most) - int(used) if most.isdigit() and used.isdigit() else None


def _available(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
