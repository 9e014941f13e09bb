"""The GPUs: how many torch sees, memory, compute capability, driver, and which of them reach each other directly."""

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from lightning_hanayo.cli.doctor.finding import Finding, gibibytes

_TOPIC = "devices"
_QUERY = ("nvidia-smi", "--query-gpu=driver_version,persistence_mode", "--format=csv,noheader")
_TIMEOUT = 20.0
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


def look() -> Seen:
    """Ask torch and the driver. Imports torch."""
    driver = _driver()
    if find_spec("torch") is None:
        return Seen((), driver=driver)
    import torch

    if not torch.cuda.is_available():
        return Seen((), torch.version.cuda or "", driver=driver)
    nccl = ".".join(map(str, _nccl_version(torch.cuda.nccl))) if torch.distributed.is_nccl_available() else ""
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


def _nccl_version(nccl: Any) -> tuple[int, ...]:
    found: tuple[int, ...] = nccl.version()
    return found


def _runs(built: str, capability: tuple[int, int]) -> bool:
    """Whether code for `built` runs on a GPU: sm_90 on its own generation, compute_80 on all later ones."""
    kind, _, number = built.partition("_")
    digits = "".join(c for c in number if c.isdigit())
    version = (int(digits[:-1] or 0), int(digits[-1:] or 0))
    return version <= capability and (kind == "compute" or version[0] == capability[0])


def examine(seen: Seen) -> Iterator[Finding]:
    """What a run with these devices is to know."""
    if not seen.gpus:
        yield _no_gpu(seen)
        return
    needs_nccl = not seen.nccl and len(seen.gpus) > 1
    yield Finding(_TOPIC, "CUDA of torch, NCCL", f"{seen.cuda}, {seen.nccl or 'no NCCL'}").flagged_if(
        needs_nccl, "problem", "install a build of torch with NCCL: ranks on GPUs send by it"
    )
    for line in dict.fromkeys(seen.driver):
        is_unloaded = "disabled" in line.partition(",")[2].lower()
        advice = "sudo nvidia-smi -pm 1: else the first use of a GPU takes seconds longer"
        yield Finding(_TOPIC, "driver, persistence", line).flagged_if(is_unloaded, "note", advice)
    for index, gpu in enumerate(seen.gpus):
        value = f"{gpu.name}, {gibibytes(gpu.num_bytes)}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        advice = "install a build of torch for this GPU: https://pytorch.org/get-started/locally"
        yield Finding(_TOPIC, f"GPU {index}", value).flagged_if(not gpu.has_kernels, "problem", advice)
    if len({(gpu.name, gpu.num_bytes) for gpu in seen.gpus}) > 1:
        advice = "give slower GPUs fewer blocks: HanayoStrategy(balance=[...])"
        yield Finding(_TOPIC, "kinds", "the GPUs differ", "note", advice)
    if len(seen.gpus) > 1:
        yield _peers(seen.gpus)


def _no_gpu(seen: Seen) -> Finding:
    if not seen.driver:
        return Finding(_TOPIC, "GPUs", "none; runs use CPUs")
    if not seen.cuda:
        advice = "install a build of torch with CUDA: https://pytorch.org/get-started/locally"
        return Finding(_TOPIC, "GPUs", f"{len(seen.driver)}, but torch was built without CUDA", "problem", advice)
    advice = "look at CUDA_VISIBLE_DEVICES, and whether the driver is as new as torch's CUDA"
    return Finding(_TOPIC, "GPUs", f"{len(seen.driver)}, of which torch can use none", "problem", advice)


def _peers(gpus: Sequence[Gpu]) -> Finding:
    apart = [(a, b) for a, gpu in enumerate(gpus) for b in range(len(gpus)) if b != a and b not in gpu.reached]
    if not apart:
        return Finding(_TOPIC, "direct access", "each GPU reads all others")
    value = f"{len(apart)} of {len(gpus) * (len(gpus) - 1)} pairs don't: {apart[0][0]} and {apart[0][1]}"
    advice = "these go through host memory: let neighbours in the pipeline be pairs that reach each other"
    return Finding(_TOPIC, "direct access", value, "note", advice)


def _driver() -> list[str]:
    try:
        found = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]
