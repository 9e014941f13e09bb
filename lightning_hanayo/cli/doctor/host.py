"""The host: processor cores, memory, the container's limits, shared memory, and limits of processes.

The folders where runs write: free space, speed, and whether files can be synced and renamed as checkpoints need.

Variables that change how a run starts, communicates or computes: what they mean, and which are left from before.

The versions that are installed, compared with those that the package supports.

The network: names that resolve, interfaces that exist, a port that is free, and connections that come through.

The GPUs: how many torch sees, memory, compute capability, driver, and which of them reach each other directly.

One line of what `hanayo doctor` has found: what was looked at, what it is, how good that is, and the way out.
"""

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from lightning_hanayo.dist_checkpointing.storage import LocalStorage, storage_of

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


_HOST = "host"
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


def look_at_host(root: Path = Path("/")) -> Limits:
    """Ask the operating system.

    Args:
        root: above sys, proc and dev.
    """
    shared, group = root / "dev/shm", root / "sys/fs/cgroup"
    quota = _text(group / "cpu.max").split()
    most, used = (_text(group / f"memory.{name}").strip() for name in ("max", "current"))
    available = re.search(r"^MemAvailable: *(\d+)", _text(root / "proc/meminfo"), re.MULTILINE)
    return Limits(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota=int(quota[0]) / int(quota[1]) if len(quota) == 2 and quota[0].isdigit() else None,
        memory=int(available[1]) * 1024 if available else None,
        group_memory=int(most) - int(used) if most.isdigit() and used.isdigit() else None,
        shared=shutil.disk_usage(shared).total if shared.is_dir() else None,
        open_files=_soft(resource.RLIMIT_NOFILE),
        locked=_soft(resource.RLIMIT_MEMLOCK),
        has_infiniband=any((root / "sys/class/infiniband").glob("*")),
    )


def examine_host(limits: Limits) -> Iterator[Finding]:
    """What a run on this host is to know."""
    quota = limits.cores if limits.quota is None else limits.quota
    text = f"{limits.cores}" if quota >= limits.cores else f"{limits.cores}, of which a quota allows {quota:g}"
    advice = f"no more than {quota:g} threads run at once: OMP_NUM_THREADS times the number of ranks"
    yield Finding(_HOST, "cores", text).flagged_if(quota < limits.cores, "note", advice)
    if free := [one for one in (limits.memory, limits.group_memory) if one is not None]:
        text = f"{gibibytes(min(free))} available{' in its control group' if limits.group_memory == min(free) else ''}"
        advice = "end other processes, or give the container more memory"
        yield Finding(_HOST, "memory", text).flagged_if(min(free) < GIB, "problem", advice)
    if limits.shared is not None:
        advice = "loaders with num_workers > 0 need more: docker run --shm-size=8g, or --ipc=host"
        yield Finding(_HOST, "/dev/shm", gibibytes(limits.shared)).flagged_if(limits.shared < GIB, "note", advice)
    text = "unlimited" if limits.open_files == _UNLIMITED else str(limits.open_files)
    has_few = _UNLIMITED < limits.open_files < _FEW_FILES
    advice = "ulimit -n 65536: each rank opens a socket to each other one"
    yield Finding(_HOST, "open files", text).flagged_if(has_few, "note", advice)
    if limits.has_infiniband and _UNLIMITED < limits.locked < GIB:
        advice = "ulimit -l unlimited: InfiniBand locks the memory that it sends from"
        yield Finding(_HOST, "locked memory", gibibytes(limits.locked), "problem", advice)


def _soft(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
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
    places = {"default_root_dir": root, "TMPDIR": tempfile.gettempdir()}
    for what, path in places.items():
        storage = storage_of(path)
        if not storage.is_local:
            yield Finding(_DISK, what, f"{path}, which isn't looked at")
            continue
        folder = os.path.abspath(storage.path)
        while not os.path.isdir(folder):  # the nearest one above it that is there
            folder = os.path.dirname(folder)
        yield from examine_folder(what, folder)


def examine_folder(what: str, path: str) -> Iterator[Finding]:
    """Look at one local folder. What is written for it is removed."""
    storage = LocalStorage(path)
    free = storage.free_bytes()
    if free is not None:
        advice = "make room: a checkpoint takes 12 to 16 bytes per parameter, twice while it is replaced"
        yield Finding(_DISK, what, f"{path}: {gibibytes(free)} free").flagged_if(free < GIB, "problem", advice)
    name = f".hanayo-doctor-{uuid.uuid4().hex[:8]}"
    try:
        seconds = _write(storage, name)
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


def _write(storage: LocalStorage, name: str) -> float:
    """Write as a save does: under another name, synced, renamed; returns the seconds of writing."""
    start = time.perf_counter()
    with storage.create(f"{name}.new") as file:
        file.write(os.urandom(2**20) * (_BYTES // 2**20))
    storage.replace(f"{name}.new", name)
    seconds = time.perf_counter() - start
    if storage.sizes([name]) != {name: _BYTES}:
        raise OSError("a file that was written, synced and renamed is not there")
    return seconds


_ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Meaning:
    """What a variable does to a run, and which of its values are traps."""

    text: str
    is_trap: Callable[[str], bool] = lambda value: False
    advice: str = ""
    level: Level = "note"


def _is_on(value: str) -> bool:
    return value not in ("", "0")


MEANINGS = {
    "OMP_NUM_THREADS": Meaning("threads of each process for operations on the CPU"),
    "CUDA_VISIBLE_DEVICES": Meaning(
        "the GPUs that processes see", lambda value: value in ("", "-1"), "unset it: it hides all GPUs"
    ),
    "CUDA_LAUNCH_BLOCKING": Meaning(
        "the host waits for each kernel", _is_on, "unset it: stages of different ranks can't overlap", "problem"
    ),
    "CUDA_DEVICE_MAX_CONNECTIONS": Meaning(
        "queues of kernels per GPU",
        lambda value: value == "1",
        "unset it: with one queue messages wait for computation that was launched before them",
    ),
    "PYTORCH_CUDA_ALLOC_CONF": Meaning("how torch manages the memory of a GPU"),
    "PYTORCH_ALLOC_CONF": Meaning("how torch manages the memory of a GPU"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Meaning(
        "memory isn't kept", _is_on, "unset it: each allocation waits for the GPU"
    ),
    "NCCL_DEBUG": Meaning("what NCCL prints", lambda value: value.upper() == "TRACE", "INFO says enough"),
    "NCCL_P2P_DISABLE": Meaning("GPUs don't read each other", _is_on, "unset it, unless a driver is at fault"),
    "NCCL_SHM_DISABLE": Meaning("no shared memory in a host", _is_on, "unset it, unless /dev/shm is too small"),
    "NCCL_IB_DISABLE": Meaning("no InfiniBand", _is_on, "unset it where there is InfiniBand: sockets are slower"),
    "NCCL_SOCKET_IFNAME": Meaning("the interfaces of NCCL"),
    "GLOO_SOCKET_IFNAME": Meaning("the interface of gloo"),
    "NCCL_MAX_CTAS": Meaning("multiprocessors that a communicator may take"),
    "NCCL_ALGO": Meaning(
        "algorithms of NCCL", bool, "unset it: a forced algorithm fails for groups that it doesn't fit"
    ),
    "NCCL_PROTO": Meaning("protocols of NCCL", bool, "unset it: LL128 is wrong on some links"),
    "TORCH_NCCL_BLOCKING_WAIT": Meaning(
        "the host waits for each transfer", _is_on, "unset it: then stages of different ranks can't overlap"
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Meaning(
        "a failed transfer ends the process",
        lambda value: value == "0",
        "unset it: a rank would hang when another fails",
    ),
    "TORCH_DISTRIBUTED_DEBUG": Meaning(
        "torch compares what all ranks call", lambda value: value.upper() == "DETAIL", "unset it to measure: it is slow"
    ),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": Meaning("torchrun's store isn't that of its ranks"),
    "PYTHONUNBUFFERED": Meaning("output is shown at once"),
    "HANAYO_DEBUG": Meaning("errors are shown with their traceback"),
}


def examine_environment(environment: Mapping[str, str] = os.environ, *, is_rank: bool = False) -> Iterator[Finding]:
    """Name the variables that are set and matter.

    Args:
        is_rank: whether this process was started as one of several, so that the variables of launchers belong to it.
    """
    if "OMP_NUM_THREADS" not in environment:
        advice = "export OMP_NUM_THREADS=1 where several ranks run on CPUs: each takes all cores otherwise"
        yield Finding(_ENVIRONMENT, "OMP_NUM_THREADS", "not set", "note", advice)
    for name, meaning in MEANINGS.items():
        value = environment.get(name)
        if value is None:
            continue
        text = f"{value}: {meaning.text}"
        yield Finding(_ENVIRONMENT, name, text).flagged_if(meaning.is_trap(value), meaning.level, meaning.advice)
    if not is_rank:
        yield from _leftovers(environment)


def _leftovers(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables of a launcher that hasn't started this process, and would change Lightning's mind about launchers."""
    in_slurm = "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    if in_slurm and "SLURM_PROCID" not in environment:
        text = f"{environment['SLURM_NTASKS']}, but srun has not started this process"
        advice = "start it by srun; or let the Trainer start its processes: SLURM_JOB_NAME=interactive"
        yield Finding(_ENVIRONMENT, "SLURM_NTASKS", text, "problem", advice)
    if "TORCHELASTIC_RUN_ID" in environment and "WORLD_SIZE" not in environment:
        text = f"{environment['TORCHELASTIC_RUN_ID']}, but torchrun has not started this process"
        yield Finding(_ENVIRONMENT, "TORCHELASTIC_RUN_ID", text, "problem", "unset it, or start the script by torchrun")
        return
    left = [name for name in ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK") if name in environment]
    if left and "WORLD_SIZE" not in environment and not in_slurm:
        text = f"{environment[left[0]]}, but no launcher has started this process"
        yield Finding(
            _ENVIRONMENT, left[0], text, "problem", f"unset {' '.join(left)}: the Trainer would start no processes"
        )


_VERSIONS = "versions"
_LEAST = {"torch": "2.10", "lightning": "2.6.6"}
_WITHDRAWN = {"lightning": ("2.6.2", "2.6.3")}
"""releases that contained malicious code"""
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
    is_old = _is_older(python, "3.10")
    yield Finding(_VERSIONS, "python", python).flagged_if(is_old, "problem", "install Python 3.10 or later")
    for name, wanted in _LEAST.items():
        yield _package(name, wanted, find(name))
    for name in _OTHERS:
        if (found := find(name)) is not None:
            yield Finding(_VERSIONS, name, found)


def _is_older(found: str, wanted: str) -> bool:
    """Whether a version is; 2.13.0+cpu is 2.13.0, and a release candidate counts as its release."""
    one, other = (tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0]))) for text in (found, wanted))
    return one < other


def _package(name: str, wanted: str, found: str | None) -> Finding:
    advice = f"pip install '{name}>={wanted}'"
    if found is None:
        return Finding(_VERSIONS, name, "not installed", "problem", advice)
    if found in _WITHDRAWN.get(name, ()):
        return Finding(
            _VERSIONS, name, f"{found}, a release with malicious code", "problem", f"{advice}, change all keys"
        )
    if _is_older(found, wanted):
        return Finding(_VERSIONS, name, f"{found}, older than {wanted}", "problem", advice)
    return Finding(_VERSIONS, name, found)


_NETWORK = "network"
_CONNECT_TIMEOUT = 3.0
"""seconds for a connection"""
_CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True)
class Network:
    """What this host says of itself."""

    hostname: str
    address: str
    """of the hostname; "" if it doesn't resolve"""
    interfaces: Collection[str]
    connects: bool
    """whether a process of this host reaches another one by that address"""


def look_at_network() -> Network:
    """Ask the operating system."""
    hostname = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        address = ""
    interfaces = [name for _, name in socket.if_nameindex()]
    return Network(hostname, address, interfaces, _connects(address or "127.0.0.1"))


def examine_network(network: Network, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """What processes that want to meet here are to know."""
    name = f"{network.hostname}, {network.address or 'which has no address'}"
    chosen = bool(environment.get("GLOO_SOCKET_IFNAME"))
    advice = "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface: gloo looks the name up"
    level: Level = "note" if chosen else "problem"
    hostname = Finding(_NETWORK, "hostname", name).flagged_if(not network.address, level, advice)
    only_here = network.address.startswith("127.") and not chosen
    advice = "no matter on one node; with several set GLOO_SOCKET_IFNAME to the interface that the others reach"
    yield hostname.flagged_if(only_here, "note", advice)
    yield Finding(_NETWORK, "interfaces", ", ".join(sorted(network.interfaces)) or "none")
    for variable in _CHOICES:
        if environment.get(variable):
            yield _interface(variable, environment[variable], network.interfaces)
    if not network.connects:
        advice = "let the firewall accept connections of this host to itself; ranks use ports that are free"
        where = network.address or "127.0.0.1"
        yield Finding(_NETWORK, "connections", f"none from this host to itself by {where}", "problem", advice)
    if "MASTER_ADDR" in environment:
        yield _main_address(environment)


def _interface(variable: str, wanted: str, interfaces: Collection[str]) -> Finding:
    """gloo takes a list of names; NCCL takes prefixes, with = for whole names and ^ for all others."""
    is_nccl = variable.startswith("NCCL")
    names = [name for name in wanted.lstrip("^=").split(",") if name]
    is_prefix = is_nccl and "=" not in wanted[:2]
    found = [one for one in interfaces if any(one.startswith(n) if is_prefix else one == n for n in names)]
    left = [one for one in interfaces if one not in found] if is_nccl and wanted.startswith("^") else found
    if left:
        return Finding(_NETWORK, variable, f"{wanted}: {', '.join(sorted(left))}")
    known = ", ".join(sorted(interfaces))
    return Finding(_NETWORK, variable, f"{wanted}: no such interface", "problem", f"choose of {known}, or unset it")


def _main_address(environment: Mapping[str, str]) -> Finding:
    address, port = environment["MASTER_ADDR"], environment.get("MASTER_PORT", "")
    where = f"{address}:{port}"
    if not port.isdigit() or not 0 < int(port) < 2**16:
        advice = "set it to a free port from 1024 to 65535, the same on all nodes"
        return Finding(_NETWORK, "MASTER_PORT", port or "not set", "problem", advice)
    try:
        family, _, _, _, target = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        advice = "set it to the name or address of the node of rank 0"
        return Finding(_NETWORK, "MASTER_ADDR", f"{address}: {error.strerror or error}", "problem", advice)
    is_main = environment.get("RANK", environment.get("NODE_RANK", "0")) == "0"
    if "TORCHELASTIC_RUN_ID" in environment or not is_main:
        reached = _reaches(family, target)
        advice = "it listens once rank 0 has started; if it has, look at the firewall between the nodes"
        found = Finding(_NETWORK, "MASTER_ADDR", f"{where} {'answers' if reached else 'does not answer'}")
        return found.flagged_if(not reached, "note", advice)
    try:
        with socket.create_server(("", int(port)), family=family):
            return Finding(_NETWORK, "MASTER_PORT", f"{where} is free")
    except OSError as error:
        advice = "choose another MASTER_PORT, or end the process that has it: ss -ltnp"
        return Finding(_NETWORK, "MASTER_PORT", f"{where}: {error.strerror or error}", "problem", advice)


def _reaches(family: int, target: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_TIMEOUT)
        return client.connect_ex(target) == 0


def _connects(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as server:
            return _reaches(family, server.getsockname())
    except OSError:
        return sys.platform == "darwin"  # where a host may have an address that it can't listen on


_DEVICES = "devices"
_QUERY = ("nvidia-smi", "--query-gpu=driver_version,persistence_mode", "--format=csv,noheader")
_QUERY_TIMEOUT = 20.0
"""seconds that nvidia-smi may take, which loads the driver first if nobody uses it"""


@dataclass(frozen=True)
class Gpu:
    """What torch says of one."""

    name: str
    num_bytes: int
    capability: tuple[int, int]
    reached: tuple[int, ...] = ()
    """those that it reads directly, itself left out"""
    has_kernels: bool = True
    """whether torch was built for its capability"""


@dataclass(frozen=True)
class Seen:
    """What torch and the driver say."""

    gpus: Sequence[Gpu]
    cuda: str = ""
    """the version that torch was built with; "" for a build without CUDA"""
    nccl: str = ""
    driver: Sequence[str] = ()
    """for each GPU of this host its driver's version, and whether that stays loaded; none without a driver"""


def look_at_devices() -> Seen:
    """Ask torch and the driver. Imports torch."""
    driver = _driver()
    if find_spec("torch") is None:
        return Seen((), driver=driver)
    import torch

    if not torch.cuda.is_available():
        return Seen((), torch.version.cuda or "", driver=driver)
    nccl = ""
    if torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    count = torch.cuda.device_count()
    built = torch.cuda.get_arch_list()
    gpus = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        reached = tuple(
            other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)
        )
        capability = (properties.major, properties.minor)
        has_kernels = not built or any(_runs(one, capability) for one in built)
        gpus.append(Gpu(properties.name, properties.total_memory, capability, reached, has_kernels))
    return Seen(gpus, torch.version.cuda or "", nccl, driver)


def _runs(built: str, capability: tuple[int, int]) -> bool:
    """Whether code for `built` runs on a GPU: sm_90 on its own generation, compute_80 on all later ones."""
    kind, _, number = built.partition("_")
    digits = "".join(c for c in number if c.isdigit())
    version = (int(digits[:-1] or 0), int(digits[-1:] or 0))
    return version <= capability and (kind == "compute" or version[0] == capability[0])


def examine_devices(seen: Seen) -> Iterator[Finding]:
    """What a run with these devices is to know."""
    if not seen.gpus:
        yield _no_gpu(seen)
        return
    needs_nccl = not seen.nccl and len(seen.gpus) > 1
    yield Finding(_DEVICES, "CUDA of torch, NCCL", f"{seen.cuda}, {seen.nccl or 'no NCCL'}").flagged_if(
        needs_nccl, "problem", "install a build of torch with NCCL: ranks on GPUs send by it"
    )
    for line in dict.fromkeys(seen.driver):
        is_unloaded = "disabled" in line.partition(",")[2].lower()
        advice = "sudo nvidia-smi -pm 1: else the first use of a GPU takes seconds longer"
        yield Finding(_DEVICES, "driver, persistence", line).flagged_if(is_unloaded, "note", advice)
    for index, gpu in enumerate(seen.gpus):
        value = f"{gpu.name}, {gibibytes(gpu.num_bytes)}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        advice = "install a build of torch for this GPU: https://pytorch.org/get-started/locally"
        yield Finding(_DEVICES, f"GPU {index}", value).flagged_if(not gpu.has_kernels, "problem", advice)
    if len({(gpu.name, gpu.num_bytes) for gpu in seen.gpus}) > 1:
        advice = "give slower GPUs fewer blocks: HanayoStrategy(balance=[...])"
        yield Finding(_DEVICES, "kinds", "the GPUs differ", "note", advice)
    if len(seen.gpus) > 1:
        yield _peers(seen.gpus)


def _no_gpu(seen: Seen) -> Finding:
    if not seen.driver:
        return Finding(_DEVICES, "GPUs", "none; runs use CPUs")
    if not seen.cuda:
        advice = "install a build of torch with CUDA: https://pytorch.org/get-started/locally"
        return Finding(_DEVICES, "GPUs", f"{len(seen.driver)}, but torch was built without CUDA", "problem", advice)
    advice = "look at CUDA_VISIBLE_DEVICES, and whether the driver is as new as torch's CUDA"
    return Finding(_DEVICES, "GPUs", f"{len(seen.driver)}, of which torch can use none", "problem", advice)


def _peers(gpus: Sequence[Gpu]) -> Finding:
    apart = [(a, b) for a, gpu in enumerate(gpus) for b in range(len(gpus)) if b != a and b not in gpu.reached]
    if not apart:
        return Finding(_DEVICES, "direct access", "each GPU reads all others")
    value = f"{len(apart)} of {len(gpus) * (len(gpus) - 1)} pairs don't: {apart[0][0]} and {apart[0][1]}"
    advice = "these go through host memory: let neighbours in the pipeline be pairs that reach each other"
    return Finding(_DEVICES, "direct access", value, "note", advice)


def _driver() -> list[str]:
    try:
        found = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]
