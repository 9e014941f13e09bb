"""Variables that change how a run starts, communicates or computes: what they mean, and which are left from before."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lightning_hanayo.cli.doctor.finding import Finding, Level

_TOPIC = "environment"


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


def examine(environment: Mapping[str, str] = os.environ, *, is_rank: bool = False) -> Iterator[Finding]:
    """Name the variables that are set and matter.

    Args:
        is_rank: whether this process was started as one of several, so that the variables of launchers belong to it.
    """
    if "OMP_NUM_THREADS" not in environment:
        advice = "export OMP_NUM_THREADS=1 where several ranks run on CPUs: each takes all cores otherwise"
        yield Finding(_TOPIC, "OMP_NUM_THREADS", "not set", "note", advice)
    for name, meaning in MEANINGS.items():
        value = environment.get(name)
        if value is None:
            continue
        text = f"{value}: {meaning.text}"
        yield Finding(_TOPIC, name, text).flagged_if(meaning.is_trap(value), meaning.level, meaning.advice)
    if not is_rank:
        yield from _leftovers(environment)


def _leftovers(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables of a launcher that hasn't started this process, and would change Lightning's mind about launchers."""
    in_slurm = "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    if in_slurm and "SLURM_PROCID" not in environment:
        text = f"{environment['SLURM_NTASKS']}, but srun has not started this process"
        advice = "start it by srun; or let the Trainer start its processes: SLURM_JOB_NAME=interactive"
        yield Finding(_TOPIC, "SLURM_NTASKS", text, "problem", advice)
    if "TORCHELASTIC_RUN_ID" in environment and "WORLD_SIZE" not in environment:
        text = f"{environment['TORCHELASTIC_RUN_ID']}, but torchrun has not started this process"
        yield Finding(_TOPIC, "TORCHELASTIC_RUN_ID", text, "problem", "unset it, or start the script by torchrun")
        return
    left = [name for name in ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK") if name in environment]
    if left and "WORLD_SIZE" not in environment and not in_slurm:
        text = f"{environment[left[0]]}, but no launcher has started this process"
        yield Finding(_TOPIC, left[0], text, "problem", f"unset {' '.join(left)}: the Trainer would start no processes")
