"""The placement: where a process lies on the axes, and what the ranks do all together."""

from abc import ABC
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.distributed import _distributed_is_initialized, _sync_ddp_if_available
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.strategy.build.process_groups import Gather, ProcessGroups
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.topology import Topology, resolve


class MeshStrategy(ParallelStrategy, ABC):
    """A strategy whose ranks lie on the axes of a topology. Decisions are the world's, metrics the data ranks'."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.num_nodes = 1
        self._topology: Topology | None = None
        self._groups: ProcessGroups | None = None

    @property
    def topology(self) -> Topology:
        """The ranks' places; known once the Trainer is there."""
        assert self._topology is not None, "the topology is known once the Trainer is constructed"
        return self._topology

    @property
    def groups(self) -> ProcessGroups:
        """This rank's process groups; there once the processes have met."""
        assert self._groups is not None, "the process groups are there once the processes have met"
        return self._groups

    @property
    def data_rank(self) -> int:
        """This process's place on the data axis."""
        return self.topology.coordinates(self.global_rank)[0]

    @property
    def pipe_rank(self) -> int:
        """This process's place on the pipe axis."""
        return self.topology.coordinates(self.global_rank)[1]

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on one node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning shall give each data rank its own share of the samples."""
        return self.topology.data > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.topology.data, "rank": self.data_rank}

    def set_world_ranks(self) -> None:
        """Called when the Trainer is constructed, and again in each process."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for function in (rank_zero_only, fabric_rank_zero_only):
            vars(function)["rank"] = self.global_rank
        self._topology = resolve(
            self.num_nodes * self.num_processes,
            pipeline_parallel_size=self.options.pipeline_parallel_size,
            data_parallel_size=self.options.data_parallel_size,
            cube=self.options.cube,
        )

    @override
    def barrier(self, name: str | None = None) -> None:
        if _distributed_is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Over the data ranks of this pipeline rank: the ranks above 0 hold no metrics."""
        group = group or self.groups.data
        if isinstance(tensor, Tensor) and group is not None:
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.world_size == 1:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Over the ranks that see other samples than this one. Called by all of them.

        `LightningModule.all_gather` passes the world where its caller named no group. The ranks above pipeline rank 0
        don't run the step that calls it, so the world would never meet there.

        Returns:
            [ranks, ...]; in a world of one rank the tensor as it is, as Lightning documents it.
        """
        if self.world_size == 1:
            return tensor
        if group is None or group is dist.group.WORLD:
            group = self.groups.metrics
        with nullcontext() if sync_grads else torch.no_grad():
            gathered: Tensor = Gather.apply(tensor, group)
        return gathered
