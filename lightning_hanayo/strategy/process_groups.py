"""The process groups of a topology that one rank belongs to, and the collectives over them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from lightning_hanayo.overlap.link_queue import DeviceLink, LinkQueue
from lightning_hanayo.strategy.groups.channels import Channels
from lightning_hanayo.strategy.groups.factory import CUBE, DATA, REPLICA, GroupFactory, GroupSettings
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
    queue: LinkQueue | None = None
    """through which the mesh's collectives go, if two actions may run at once"""


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's groups. `data`, `data_control` and `cube` are None where they would hold one rank.

    `control`, `data_control`, `replica`, `cube.plane` and `cube.whole` carry tensors of the CPU (gloo).
    """

    factory: GroupFactory
    pipe_ranks: tuple[int, ...]
    control: dist.ProcessGroup
    channels: Channels
    data: dist.ProcessGroup | None
    data_control: dist.ProcessGroup | None
    metrics: dist.ProcessGroup
    """ranks that see different samples, or this one alone: what torchmetrics syncs over (None would mean the world)"""
    replica_ranks: tuple[int, ...]
    """all ranks that train one copy of the model: pipeline and cube"""
    replica: dist.ProcessGroup
    replica_tensors: dist.ProcessGroup
    """the same ranks, for tensors of the device"""
    cube: CubeGroups | None
    gradient_groups: dict[str, dist.ProcessGroup]
    """for gradients that are partial over these axes of the cube: the ranks, data ranks too, that sum them"""

    @staticmethod
    def create(
        topology: Topology, rank: int, factory: GroupFactory, *, shares_samples: bool = True, pairs: bool = False
    ) -> "ProcessGroups":
        """Create all groups. Called by all ranks of the world alike.

        Equal groups are one: without a cube `replica` is `control`, and `metrics` is `data`.

        Args:
            topology: the ranks.
            rank: this one.
            factory: makes the groups.
            shares_samples: whether the ranks of a cube do.
            pairs: whether a rank may run two actions at once.
        """

        def control(*axes: str) -> dist.ProcessGroup:
            return factory.control(topology.groups(*axes))

        def tensors(settings: GroupSettings, *axes: str) -> dist.ProcessGroup:
            return factory.tensors(topology.groups(*axes), settings)

        replicates = topology.data > 1
        is_cube = prod(topology.cube) > 1
        cube, gradient_groups = None, {}
        if is_cube:
            whole, place = control("x", "y", "z"), rank % prod(topology.cube)
            queue = (DeviceLink if factory.is_native else LinkQueue)() if pairs else None
            mesh = Mesh.of(topology.cube, place, lambda axes: tensors(CUBE, *axes), control=whole, queue=queue)
            cube = CubeGroups(mesh, control("y", "z"), whole, queue)
            if replicates:
                partial = [axes for axes in PARTIAL_AXES if mesh.size(axes) > 1]
                gradient_groups = {axes: tensors(DATA, "data", *axes) for axes in partial}
        return ProcessGroups(
            factory,
            topology.group_of(rank, "pipe"),
            control("pipe"),
            Channels(factory, topology.groups("pipe"), rank),
            tensors(DATA, "data") if replicates else None,
            control("data") if replicates else None,
            tensors(DATA, "data", *("xyz" if shares_samples else "")),
            topology.group_of(rank, "pipe", "x", "y", "z"),
            control("pipe", "x", "y", "z"),
            tensors(REPLICA, "pipe", "x", "y", "z"),
            cube,
            gradient_groups,
        )

    def summing(self, partial_axes: str) -> dist.ProcessGroup | None:
        """The group that sums a gradient which is partial over these axes of the cube; None: this rank has it whole."""
        if self.cube is None or self.cube.mesh.size(partial_axes) == 1:
            return self.data
        if self.data is not None:
            return self.gradient_groups[partial_axes]
        return self.cube.mesh.axis(partial_axes).group


def broadcast_values(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give all ranks of the world rank 0's values, as if the model had been built once.

    They pass over `device`, one tensor at a time, wherever they are stored: links of GPUs are faster. They
    are sent as bytes: gloo knows neither complex numbers (rotary positions) nor 16-bit integers.
    """
    for tensor in tensors:
        if tensor.numel():
            whole = tensor.detach().to(device).contiguous()
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
