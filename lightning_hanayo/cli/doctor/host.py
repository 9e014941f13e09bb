"""Looks at one host, topic by topic, and yields a finding for each thing that it has looked at.

versions      the installed packages, compared with those that are supported
devices       the GPUs: how many torch sees, driver, compute capability, which of them reach each other directly
host          processor cores, memory, limits of the container and of processes, shared memory
disk          the folders where runs write: free space, speed, whether files are synced and renamed as checkpoints need
network       names that resolve, interfaces that exist; links show what comes through
environment   variables that change how a run starts, communicates or computes, and those that a launcher has left
"""

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Literal

import psutil

from lightning_hanayo.dist_checkpointing.target import Storage

Level = Literal["ok", "note", "problem"]
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """What one look has found.

    Args:
        topic: such as "disk".
        name: what was looked at, such as "free space of /tmp".
        value: what it is.
        level: "note": something to know, which makes no run fail by itself; "problem": a run would fail, or be wrong.
        advice: the way out, in one line; "" if all is well.
    """

    topic: str
    name: str
    value: str
    level: Level = "ok"
    advice: str = ""

    def flagged_if(self, is_bad: bool, level: Level, advice: str) -> "Finding":
        """The same finding; at this level and with this advice if it is bad."""
        return replace(self, level=level, advice=advice) if is_bad else self


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if something would make a run fail, else 0."""
    return int(any(finding.level == "problem" for finding in findings))


def gibibytes(num_bytes: float) -> str:
    """A size for reading.

    Example:
        >>> gibibytes(3 * 2**29), gibibytes(2**26)
        ('1.5 GiB', '64 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


_VERSIONS = "versions"
_LEAST = {"torch": "2.10", "lightning": "2.6.6"}
_OTHERS = ("lightning-hanayo", "xxhash", "safetensors", "jsonargparse", "torchmetrics", "transformers")


def installed(name: str) -> str | None:
    """The version of a package; None if it isn't installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def examine_versions(
    find: Callable[[str], str | None] = installed, python: str = platform.python_version()
) -> Iterator[Finding]:
    """Look at Python and the packages; nothing of them is imported."""
    yield Finding(_VERSIONS, "python", python)
    for name, wanted in _LEAST.items():
        found, advice = find(name), f"pip install '{name}>={wanted}'"
        if found is None:
            yield Finding(_VERSIONS, name, "not installed", "problem", advice)
        elif _is_older(found, wanted):
            yield Finding(_VERSIONS, name, f"{found}, older than {wanted}", "problem", advice)
        else:
            yield Finding(_VERSIONS, name, found)
    for name in _OTHERS:
        if (found := find(name)) is not None:
            yield Finding(_VERSIONS, name, found)


def _is_older(found: str, wanted: str) -> bool:
    """Whether a version is; 2.13.0+cpu is 2.13.0, and a release candidate counts as its release."""
    one, other = (tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0]))) for text in (found, wanted))
    return one < other


_DEVICES = "devices"
_QUERY = ("nvidia-smi", "--query-gpu=driver_version,persistence_mode", "--format=csv,noheader")
_QUERY_TIMEOUT = 20.0
"""seconds that nvidia-smi may take, which loads the driver first if nobody uses it"""


@dataclass(frozen=True)
class Seen:
    """What torch and the driver say."""

    gpus: Sequence[str] = ()
    """name, memory and compute capability of each"""
    apart: Sequence[tuple[int, int]] = ()
    """those of which the first one doesn't read the second one directly"""
    cuda: str = ""
    """the version that torch was built with; "" for a build without CUDA"""
    nccl: str = ""
    driver: Sequence[str] = ()
    """for each GPU of this host its driver's version, and whether that stays loaded; none without a driver"""


def look_at_devices() -> Seen:
    """Ask torch and the driver. Imports torch."""
    driver: list[str] = []
    with suppress(OSError, subprocess.SubprocessError):  # no nvidia-smi, or no driver that answers
        found = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT, check=True)
        driver = [line.strip() for line in found.stdout.splitlines() if line.strip()]
    if find_spec("torch") is None:
        return Seen(driver=driver)
    import torch

    nccl = ""
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    all_pairs = list(permutations(range(torch.cuda.device_count()), 2))
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return Seen(
        [f"{one.name}, {gibibytes(one.total_memory)}, compute capability {one.major}.{one.minor}" for one in gpus],
        [pair for pair in all_pairs if not torch.cuda.can_device_access_peer(*pair)],
        torch.version.cuda or "",
        nccl,
        driver,
    )


def examine_devices(seen: Seen) -> Iterator[Finding]:
    """What a run with these devices is to know."""
    gpus = seen.gpus
    if not gpus and not seen.driver:
        yield Finding(_DEVICES, "GPUs", "none; runs use CPUs")
    elif not gpus and not seen.cuda:
        advice = "install a build of torch with CUDA: https://pytorch.org/get-started/locally"
        yield Finding(_DEVICES, "GPUs", f"{len(seen.driver)}, but torch was built without CUDA", "problem", advice)
    elif not gpus:
        advice = "look at CUDA_VISIBLE_DEVICES, and whether the driver is as new as torch's CUDA"
        yield Finding(_DEVICES, "GPUs", f"{len(seen.driver)}, of which torch can use none", "problem", advice)
    else:
        advice = "install a build of torch with NCCL: ranks on GPUs send by it"
        versions = Finding(_DEVICES, "CUDA of torch, NCCL", f"{seen.cuda}, {seen.nccl or 'no NCCL'}")
        yield versions.flagged_if(not seen.nccl and len(gpus) > 1, "problem", advice)
    for line in dict.fromkeys(seen.driver) if gpus else ():
        advice = "sudo nvidia-smi -pm 1: else the first use of a GPU takes seconds longer"
        is_unloaded = "disabled" in line.partition(",")[2].lower()
        yield Finding(_DEVICES, "driver, persistence", line).flagged_if(is_unloaded, "note", advice)
    for index, gpu in enumerate(gpus):
        yield Finding(_DEVICES, f"GPU {index}", gpu)
    if len(set(gpus)) > 1:
        advice = "give slower GPUs fewer blocks: HanayoStrategy(balance=[...])"
        yield Finding(_DEVICES, "kinds", "the GPUs differ", "note", advice)
    if len(gpus) > 1:
        value = "each GPU reads all others"
        if seen.apart:
            value = f"{len(seen.apart)} of {len(gpus) * (len(gpus) - 1)} pairs don't: {seen.apart[0]}"
        advice = "these go through host memory: let neighbours in the pipeline be pairs that reach each other"
        yield Finding(_DEVICES, "direct access", value).flagged_if(bool(seen.apart), "note", advice)


_HOST = "host"
_FEW_FILES = 1024


def examine_host(root: Path = Path("/")) -> Iterator[Finding]:
    """What a run on this host is to know.

    Args:
        root: above sys and dev.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group, shared = root / "sys/fs/cgroup", root / "dev/shm"
    quota = _text(group / "cpu.max").split()  # microseconds of processor time in each period of so many microseconds
    allowed = int(quota[0]) / int(quota[1]) if quota and quota[0].isdigit() else cores
    text = f"{cores}" if allowed >= cores else f"{cores}, of which a quota allows {allowed:g}"
    advice = f"no more than {allowed:g} threads run at once: OMP_NUM_THREADS times the number of ranks"
    yield Finding(_HOST, "cores", text).flagged_if(allowed < cores, "note", advice)
    free = psutil.virtual_memory().available
    most, used = (_text(group / f"memory.{name}").strip() for name in ("max", "current"))
    left = int(most) - int(used) if most.isdigit() and used.isdigit() else free
    text = f"{gibibytes(min(left, free))} available{' in its control group' if left < free else ''}"
    advice = "end other processes, or give the container more memory"
    yield Finding(_HOST, "memory", text).flagged_if(min(left, free) < GIB, "problem", advice)
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        advice = "loaders with num_workers > 0 need more: docker run --shm-size=8g, or --ipc=host"
        yield Finding(_HOST, "/dev/shm", gibibytes(size)).flagged_if(size < GIB, "note", advice)
    files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    text = "unlimited" if files == resource.RLIM_INFINITY else str(files)
    has_few = files < _FEW_FILES and files != resource.RLIM_INFINITY
    advice = "ulimit -n 65536: each rank opens a socket to each other one"
    yield Finding(_HOST, "open files", text).flagged_if(has_few, "note", advice)
    has_infiniband = any((root / "sys/class/infiniband").glob("*"))
    if has_infiniband and locked < GIB and locked != resource.RLIM_INFINITY:
        advice = "ulimit -l unlimited: InfiniBand locks the memory that it sends from"
        yield Finding(_HOST, "locked memory", gibibytes(locked), "problem", advice)


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


_DISK = "disk"
_BYTES = 16 * 2**20
"""that are written to measure the speed"""
_SLOW = 20 * 2**20
"""bytes per second below which saves are felt"""


def examine_disk(root: str) -> Iterator[Finding]:
    """Look at the folder of checkpoints and logs, and at that of temporary files.

    Args:
        root: the Trainer's default_root_dir, which need not be there so far.
    """
    for what, path in {"default_root_dir": root, "TMPDIR": tempfile.gettempdir()}.items():
        storage = Storage(path)
        if not storage.is_local:
            yield Finding(_DISK, what, f"{path}, which isn't looked at")
            continue
        folder = os.path.abspath(storage.path)
        while not os.path.isdir(folder):  # the nearest one above it that is there
            folder = os.path.dirname(folder)
        yield from examine_folder(what, folder)


def examine_folder(what: str, path: str) -> Iterator[Finding]:
    """Look at one local folder. What is written for it is removed."""
    storage = Storage(path)
    free = storage.free_bytes() or 0
    advice = "make room: a checkpoint takes 12 to 16 bytes per parameter, twice while it is replaced"
    yield Finding(_DISK, what, f"{path}: {gibibytes(free)} free").flagged_if(free < GIB, "problem", advice)
    name = f".hanayo-doctor-{uuid.uuid4().hex[:8]}"
    start = time.perf_counter()
    try:  # as a save does: under another name, synced, renamed
        with storage.create(f"{name}.new") as file:
            file.write(os.urandom(2**20) * (_BYTES // 2**20))
        storage.replace(f"{name}.new", name)
        seconds = time.perf_counter() - start
        if storage.sizes([name]) != {name: _BYTES}:
            raise OSError("a file that was written, synced and renamed is not there")
    except OSError as error:
        advice = "choose a folder that you may write to, on a file system that renames files"
        yield Finding(_DISK, f"writing to {what}", f"{path}: {error.strerror or error}", "problem", advice)
        return
    finally:
        for left in (name, f"{name}.new"):
            with suppress(OSError):
                storage.remove(left)
    speed = _BYTES / max(seconds, 1e-6)
    advice = "HanayoStrategy(save_async=True) lets training go on while a checkpoint is written"
    written = Finding(_DISK, f"writing to {what}", f"{gibibytes(speed)}/s, synced and renamed")
    yield written.flagged_if(speed < _SLOW, "note", advice)


_NETWORK = "network"
_CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def examine_network(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """What processes that want to meet here are to know."""
    hostname, address = socket.gethostname(), ""
    with suppress(OSError):  # the name doesn't resolve
        address = str(socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)[0][4][0])
    chosen = bool(environment.get("GLOO_SOCKET_IFNAME"))
    found = Finding(_NETWORK, "hostname", f"{hostname}, {address or 'which has no address'}")
    advice = "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface: gloo looks the name up"
    found = found.flagged_if(not address, "note" if chosen else "problem", advice)
    advice = "no matter on one node; with several set GLOO_SOCKET_IFNAME to the interface that the others reach"
    yield found.flagged_if(address.startswith("127.") and not chosen, "note", advice)
    interfaces = sorted(name for _, name in socket.if_nameindex())
    yield Finding(_NETWORK, "interfaces", ", ".join(interfaces) or "none")
    for variable in _CHOICES:
        if wanted := environment.get(variable):
            used = _interfaces(variable, wanted, interfaces)
            advice = f"choose of {', '.join(interfaces)}, or unset it"
            one = Finding(_NETWORK, variable, f"{wanted}: {', '.join(used) or 'no such interface'}")
            yield one.flagged_if(not used, "problem", advice)


def _interfaces(variable: str, wanted: str, interfaces: Collection[str]) -> list[str]:
    """Those that are used. gloo takes names; NCCL takes prefixes, with = whole names, and with ^ all others."""
    is_nccl = variable.startswith("NCCL")
    names = tuple(name for name in wanted.lstrip("^=").split(",") if name)
    is_prefix = is_nccl and "=" not in wanted[:2]
    found = [one for one in interfaces if (one.startswith(names) if is_prefix else one in names)]
    return [one for one in interfaces if one not in found] if is_nccl and wanted.startswith("^") else found


_ENVIRONMENT = "environment"
_SHOWN = re.compile(r"(OMP|CUDA|PYTORCH|TORCH|NCCL|GLOO|HANAYO)_")
_ON = "(?!0?$).*"
"""any text but 0 and none"""
_TRAPS: Mapping[str, tuple[str, str]] = {
    "CUDA_VISIBLE_DEVICES": ("|-1", "unset it: it hides all GPUs"),
    "CUDA_LAUNCH_BLOCKING": (_ON, "unset it: stages of different ranks can't overlap"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "unset it: messages would wait for the computation launched before them"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_ON, "unset it: each allocation waits for the GPU"),
    "NCCL_DEBUG": ("(?i:trace)", "INFO says enough"),
    "NCCL_P2P_DISABLE": (_ON, "unset it, unless a driver is at fault: GPUs don't read each other"),
    "NCCL_SHM_DISABLE": (_ON, "unset it, unless /dev/shm is too small"),
    "NCCL_IB_DISABLE": (_ON, "unset it where there is InfiniBand: sockets are slower"),
    "NCCL_ALGO": (".+", "unset it: a forced algorithm fails for groups that it doesn't fit"),
    "NCCL_PROTO": (".+", "unset it: LL128 is wrong on some links"),
    "TORCH_NCCL_BLOCKING_WAIT": (_ON, "unset it: then stages of different ranks can't overlap"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "unset it: a rank would hang when another fails"),
    "TORCH_DISTRIBUTED_DEBUG": ("(?i:detail)", "unset it to measure: comparing what all ranks call is slow"),
}
"""a pattern of values that slow runs down or make them fail, and the way out"""


def examine_environment(environment: Mapping[str, str] = os.environ, *, is_rank: bool = False) -> Iterator[Finding]:
    """Name the variables that are set and matter.

    Args:
        is_rank: whether this process was started as one of several, so that the variables of launchers belong to it.
    """
    if "OMP_NUM_THREADS" not in environment:
        advice = "export OMP_NUM_THREADS=1 where several ranks run on CPUs: each takes all cores otherwise"
        yield Finding(_ENVIRONMENT, "OMP_NUM_THREADS", "not set", "note", advice)
    for name, value in sorted(environment.items()):
        if _SHOWN.match(name):
            trap, advice = _TRAPS.get(name, ("(?!)", ""))
            level: Level = "problem" if name == "CUDA_LAUNCH_BLOCKING" else "note"
            is_bad = re.fullmatch(trap, value) is not None
            yield Finding(_ENVIRONMENT, name, value).flagged_if(is_bad, level, advice)
    if not is_rank:
        yield from _leftovers(environment)


def _leftovers(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables of a launcher that hasn't started this process, and would change Lightning's mind about launchers."""
    in_slurm = "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    left = [name for name in ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK") if name in environment]
    has_world = "WORLD_SIZE" in environment
    if in_slurm and "SLURM_PROCID" not in environment:
        text = f"{environment['SLURM_NTASKS']}, but srun has not started this process"
        advice = "start it by srun; or let the Trainer start its processes: SLURM_JOB_NAME=interactive"
        yield Finding(_ENVIRONMENT, "SLURM_NTASKS", text, "problem", advice)
    if "TORCHELASTIC_RUN_ID" in environment and not has_world:
        text = f"{environment['TORCHELASTIC_RUN_ID']}, but torchrun has not started this process"
        yield Finding(_ENVIRONMENT, "TORCHELASTIC_RUN_ID", text, "problem", "unset it, or start the script by torchrun")
    elif left and not has_world and not in_slurm:
        text = f"{environment[left[0]]}, but no launcher has started this process"
        advice = f"unset {' '.join(left)}: the Trainer would start no processes"
        yield Finding(_ENVIRONMENT, left[0], text, "problem", advice)
