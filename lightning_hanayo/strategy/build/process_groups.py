"""The groups: the process groups of a topology, as one rank sees them."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Backend

from lightning_hanayo.tensor3d.mesh import Mesh
from lightning_hanayo.topology import Topology

PARTIAL = ("x", "xy", "xz", "xyz")
"""the axes along which gradients of 3-D layers are partial"""


@dataclass(frozen=True)
class CubeGroups:
    """The ranks of a cube: their grid, and gloo groups for what isn't a tensor."""

    grid: Mesh
    plane: dist.ProcessGroup
    """y and z"""
    whole: dist.ProcessGroup


@dataclass(frozen=True)
class ProcessGroups:
    """`data`, `data_control` and `cube` are None where they would hold one rank.

    `control` and `replica` carry CPU tensors (gloo).
    """

    pipe_ranks: tuple[int, ...]
    control: dist.ProcessGroup
    channels: dict[tuple[int, int], dist.ProcessGroup]
    """on GPUs: a group for each ordered pair of neighbours on the ring of pipeline ranks"""
    data: dist.ProcessGroup | None
    data_control: dist.ProcessGroup | None
    metrics: dist.ProcessGroup
    """ranks that see different samples, or this one alone: what torchmetrics syncs over (None would mean the world)"""
    replica_ranks: tuple[int, ...]
    """all ranks that train one copy of the model: pipe and cube"""
    replica: dist.ProcessGroup
    cube: "CubeGroups | None"
    sums: dict[str, dist.ProcessGroup]
    """by the axes along which a gradient is partial: the ranks, data ranks too, whose gradients make the whole one"""

    @staticmethod
    def create(
        topology: Topology, rank: int, device: torch.device, timeout: timedelta, *, shares: bool = True
    ) -> "ProcessGroups":
        """Called by all ranks of the world, in the same order. `shares`: a cube's ranks see different samples."""

        def mine(*axes: str, backend: str | None = "gloo") -> dist.ProcessGroup:
            group: dist.ProcessGroup
            group, _ = dist.new_subgroups_by_enumeration(
                [list(ranks) for ranks in topology.groups(*axes)], timeout=timeout, backend=backend
            )
            return group

        on_gpu = device.type != "cpu"
        payload = None if on_gpu else "gloo"
        control = mine("pipe")
        channels = _channels(topology, rank, timeout) if on_gpu else {}
        data_control = mine("data") if topology.data > 1 else None
        data = mine("data", backend=None) if on_gpu and topology.data > 1 else data_control
        if topology.cube == (1, 1, 1):
            metrics = data or mine("data")
            places = topology.group_of(rank, "pipe")
            return ProcessGroups(places, control, channels, data, data_control, metrics, places, control, None, {})
        cube = Mesh.of(topology.cube, rank % prod(topology.cube), lambda names: mine(*names, backend=payload))
        sums = {}
        if topology.data > 1:
            sums = {names: mine("data", *names, backend=payload) for names in PARTIAL if cube.size(names) > 1}
        return ProcessGroups(
            topology.group_of(rank, "pipe"),
            control,
            channels,
            data,
            data_control,
            mine("data", *("xyz" if shares else ""), backend=payload),
            topology.group_of(rank, "pipe", "x", "y", "z"),
            mine("pipe", "x", "y", "z"),
            CubeGroups(cube, mine("y", "z"), mine("x", "y", "z")),
            sums,
        )

    def sums_of(self, partial: str) -> dist.ProcessGroup | None:
        """The ranks over which a gradient that is partial along these axes is summed; None for none."""
        if self.cube is None or self.cube.grid.size(partial) == 1:
            return self.data
        return self.sums[partial] if self.data is not None else self.cube.grid.axis(partial).group


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


def objects(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Every rank's `value`, which can be pickled, in rank order. Called by all ranks of the group."""
    everybody: list[Any] = [None] * group.size()
    dist.all_gather_object(everybody, value, group)
    return everybody


class Gather(torch.autograd.Function):
    """[...] of each rank of a group to [ranks, ...]; a rank's gradient is the sum of what all ranks send back for it.

    torch's own (2.13) is deprecated, and its backward over gloo takes ranks of a group for ranks of the world.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Called by all ranks of the group, with tensors of one shape."""
        ctx.group = group
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Called by all ranks of the group."""
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None
