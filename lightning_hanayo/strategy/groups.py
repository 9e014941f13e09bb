"""The groups: the process groups of a topology, as one rank sees them."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Backend

from lightning_hanayo.topology import Topology


@dataclass(frozen=True)
class Groups:
    """`data` and `data_control` are None where they would hold one rank; control groups carry CPU tensors (gloo)."""

    pipe_ranks: tuple[int, ...]
    control: dist.ProcessGroup
    channels: dict[tuple[int, int], dist.ProcessGroup]
    """on GPUs: a group for each ordered pair of neighbours on the ring of pipeline ranks"""
    data: dist.ProcessGroup | None
    data_control: dist.ProcessGroup | None
    metrics: dist.ProcessGroup
    """the data ranks, or this rank alone: what torchmetrics syncs over (None would mean the world)"""

    @staticmethod
    def create(topology: Topology, rank: int, device: torch.device, timeout: timedelta) -> "Groups":
        """Called by all ranks of the world, in the same order."""

        def mine(axis: str, backend: str | None) -> dist.ProcessGroup:
            group: dist.ProcessGroup
            group, _ = dist.new_subgroups_by_enumeration(
                [list(ranks) for ranks in topology.groups(axis)], timeout=timeout, backend=backend
            )
            return group

        on_gpu = device.type != "cpu"
        control = mine("pipe", "gloo")
        channels = _channels(topology, rank, timeout) if on_gpu else {}
        data_control = mine("data", "gloo") if topology.data > 1 else None
        data = mine("data", None) if on_gpu and topology.data > 1 else data_control
        metrics = data or mine("data", "gloo")
        return Groups(topology.group_of(rank, "pipe"), control, channels, data, data_control, metrics)


def _channels(topology: Topology, rank: int, timeout: timedelta) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Stages follow each other on neighbouring ranks, or on the last and the first one: no other pair sends."""
    size, channels = topology.pipe, {}
    steps = sorted({(i, (i + step) % size) for i in range(size) for step in (1, -1)} - {(0, 0)})
    for ranks in topology.groups("pipe"):
        for sender, receiver in steps:
            group = dist.new_group([ranks[sender], ranks[receiver]], timeout=timeout)
            if rank in ranks:
                channels[sender, receiver] = group
    return channels


def backend_for(device: torch.device) -> str:
    """Both kinds of tensors can be sent where there is a GPU: models are agreed on while they lie on the CPU."""
    return (
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{Backend.default_device_backend_map[device.type]}"
    )


def agree(tensors: Iterable[torch.Tensor]) -> None:
    """Give all ranks of the world rank 0's values, as if the model had been built once.

    They travel as bytes: gloo knows neither complex numbers (rotary positions) nor 16-bit integers.
    """
    for tensor in tensors:
        if tensor.numel():
            whole = tensor.detach().contiguous()
            dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
            tensor.detach().copy_(whole)
