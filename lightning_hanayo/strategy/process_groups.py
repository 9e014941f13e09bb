"""The process groups of a topology that one rank belongs to, and the collectives over them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Backend

from lightning_hanayo.strategy.options import Options
from lightning_hanayo.tensor3d.mesh import Mesh
from lightning_hanayo.topology import Topology

PARTIAL_AXES = ("x", "xy", "xz", "xyz")
"""the axes over which gradients of 3-D layers are still to be summed after a batch"""


@dataclass(frozen=True)
class CubeGroups:
    """The ranks that hold each stage together: their mesh, and gloo groups for Python objects."""

    mesh: Mesh
    plane: dist.ProcessGroup
    """the ranks that differ along y and z"""
    whole: dist.ProcessGroup


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's groups. `data`, `data_control` and `cube` are None where they would hold one rank.

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
    """all ranks that train one copy of the model: pipeline and cube"""
    replica: dist.ProcessGroup
    cube: CubeGroups | None
    gradient_groups: dict[str, dist.ProcessGroup]
    """for gradients that are partial over these axes of the cube: the ranks, data ranks too, that sum them"""

    @staticmethod
    def create(topology: Topology, rank: int, device: torch.device, options: Options) -> "ProcessGroups":
        """Create all groups. Called by all ranks of the world, in the same order."""
        timeout = options.timeout

        def own(*axes: str, backend: str | None = "gloo") -> dist.ProcessGroup:
            group: dist.ProcessGroup
            group, _ = dist.new_subgroups_by_enumeration(
                [list(ranks) for ranks in topology.groups(*axes)], timeout=timeout, backend=backend
            )
            return group

        on_gpu = device.type != "cpu"
        tensor_backend = None if on_gpu else "gloo"
        control = own("pipe")
        channels = _channels(topology, rank, timeout) if on_gpu else {}
        data_control = own("data") if topology.data > 1 else None
        data = own("data", backend=None) if on_gpu and topology.data > 1 else data_control
        pipe_ranks = topology.group_of(rank, "pipe")
        if topology.cube == (1, 1, 1):
            metrics = data or own("data")
            return ProcessGroups(
                pipe_ranks, control, channels, data, data_control, metrics, pipe_ranks, control, None, {}
            )
        mesh = Mesh.of(topology.cube, rank % prod(topology.cube), lambda axes: own(*axes, backend=tensor_backend))
        gradient_groups = {}
        if topology.data > 1:
            partial = [axes for axes in PARTIAL_AXES if mesh.size(axes) > 1]
            gradient_groups = {axes: own("data", *axes, backend=tensor_backend) for axes in partial}
        return ProcessGroups(
            pipe_ranks,
            control,
            channels,
            data,
            data_control,
            own("data", *("xyz" if options.cube_outside == "share" else ""), backend=tensor_backend),
            topology.group_of(rank, "pipe", "x", "y", "z"),
            own("pipe", "x", "y", "z"),
            CubeGroups(mesh, own("y", "z"), own("x", "y", "z")),
            gradient_groups,
        )

    def summing(self, partial_axes: str) -> dist.ProcessGroup | None:
        """The group that sums a gradient which is partial over these axes of the cube; None: this rank has it whole."""
        if self.cube is None or self.cube.mesh.size(partial_axes) == 1:
            return self.data
        if self.data is not None:
            return self.gradient_groups[partial_axes]
        return self.cube.mesh.axis(partial_axes).group


def _channels(topology: Topology, rank: int, timeout: timedelta) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Consecutive stages are on neighbouring ranks, or on the last and the first one: no other pair sends."""
    size, channels = topology.pipe, {}
    pairs = sorted({(i, (i + step) % size) for i in range(size) for step in (1, -1)} - {(0, 0)})
    for ranks in topology.groups("pipe"):
        for sender, receiver in pairs:
            group = dist.new_group([ranks[sender], ranks[receiver]], timeout=timeout)
            if rank in ranks:
                channels[sender, receiver] = group
    return channels


def backend_for(device: torch.device) -> str:
    """The backends to initialize: with a GPU also gloo, since models are broadcast while they are on the CPU."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{Backend.default_device_backend_map[device.type]}"


def broadcast_values(tensors: Iterable[torch.Tensor]) -> None:
    """Give all ranks of the world rank 0's values, as if the model had been built once.

    They are sent as bytes: gloo knows neither complex numbers (rotary positions) nor 16-bit integers.
    """
    for tensor in tensors:
        if tensor.numel():
            whole = tensor.detach().contiguous()
            dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
            tensor.detach().copy_(whole)


class AllGather(torch.autograd.Function):
    """[...] of each rank of a group to [ranks, ...]; a rank's gradient is the sum of what all ranks send back for it.

    torch's own (2.13) is deprecated, and its backward over gloo mistakes ranks of a group for ranks of the world.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, before_backward: Callable[[], object] = int
    ) -> torch.Tensor:
        """Called by all ranks of the group, with tensors of one shape. `before_backward` is called in the backward."""
        ctx.group, ctx.before_backward = group, before_backward
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Called by all ranks of the group."""
        ctx.before_backward()
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None, None
