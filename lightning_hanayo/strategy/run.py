"""One run of the Trainer on one rank: who it is, whom it is connected to, what it has changed, and how all that ends.

begun     relays, collectives, hooks of torch, the pipeline, norms, ...     each adds its end when it begins
end       ..., norms, the pipeline, ...                                     the last first, together with all ranks
abandon   the same order                                                    after a failure: waits for nobody
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.errors import available
from lightning_hanayo.partition.guards import ParameterGuard
from lightning_hanayo.pipeline_parallel.nan import MadeValues
from lightning_hanayo.pipeline_parallel.rng import SharedGenerators
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport, Relay
from lightning_hanayo.strategy.failure import Failures
from lightning_hanayo.strategy.groups import ProcessGroups
from lightning_hanayo.strategy.losses import SampleCount
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard
from lightning_hanayo.topology import Topology

if TYPE_CHECKING:
    from lightning_hanayo.strategy.pipeline import Pipeline
    from lightning_hanayo.strategy.setup.prepared_model import Cube

End = Callable[[], object]


class RunParts:
    """The parts of a run that have begun on this rank, and how each of them ends."""

    def __init__(self) -> None:
        self._parts: list[tuple[End, End]] = []

    def add(self, end: End, abandon: End | None = None) -> None:
        """Called when a part begins.

        Args:
            end: called on all ranks, when the run has ended on this one: it may wait until others have its messages.
            abandon: called after a failure, maybe after `end`: other ranks may be gone, and gloo wakes those that wait
                for this one only when no object holds a process group any more. None: the same as `end`.
        """
        self._parts.append((end, abandon or end))

    def end(self) -> None:
        """End all parts, the last one first."""
        for end, _ in reversed(self._parts):
            end()

    def abandon(self) -> None:
        """Abandon all parts, the last one first."""
        for _, abandon in reversed(self._parts):
            abandon()


@dataclass(eq=False, repr=False)
class Run:
    """The state that the parts of a run share."""

    trainer: "pl.Trainer"
    options: Options
    topology: Topology
    _open_groups: ProcessGroups | None
    """None after a failure"""
    failures: Failures
    rank: int
    device: torch.device
    pipeline: "Pipeline" = field(init=False)
    """this rank's part of it, once the model is set up"""
    cube: "Cube | None" = field(default=None, init=False)
    """None without one"""

    def __post_init__(self) -> None:
        self.data_rank, self.pipe_rank, *_ = self.topology.coordinates(self.rank)
        self.parts = RunParts()
        self.attributes = TemporaryAttributes()
        self.guard = ParameterGuard(self.device)
        self.values = MadeValues(is_watched=self.options.nonfinite != "ignore")
        self.seed = 0
        """of the random streams, and of values that are made on each rank; the same on all ranks"""
        self.pipe_relay = self._relay(self.groups.pipe_ranks)
        """from pipeline rank 0 to the others"""
        is_cube = prod(self.topology.cube) > 1
        self.replica_relay = self._relay(self.groups.replica_ranks) if is_cube else self.pipe_relay
        """from the first of the ranks that train one copy of the model to the others"""
        self.generators = SharedGenerators(self.replica_relay, self.device)
        self.samples = SampleCount()

    @property
    def module(self) -> "pl.LightningModule":
        """The user's module."""
        return self.trainer.lightning_module

    @property
    def mesh(self) -> Mesh:
        """Of the cube; without one, of this rank alone."""
        return Mesh.single() if self.cube is None else self.cube.mesh

    def shard_of(self, parameter: Tensor) -> Shard:
        """How the ranks of the cube hold a parameter of this pipeline rank; without one, this rank has the whole."""
        return Shard(tuple(map(DimShard, parameter.shape))) if self.cube is None else self.cube.shards[parameter]

    def region_of(self, parameter: Tensor) -> Region:
        """The entries of the whole parameter that this rank holds."""
        return Region.whole(parameter.shape) if self.cube is None else self.cube.region(parameter)

    @property
    def has_pipeline(self) -> bool:
        """Whether the model is set up."""
        return "pipeline" in vars(self)

    def reseed(self, seed: int) -> None:
        """Let the random streams go on as those of the run that had this seed. Called by all ranks."""
        self.seed = seed
        self.pipeline.random_streams.reseed(seed)

    @property
    def groups(self) -> ProcessGroups:
        """This rank's process groups. Not to be kept in local variables: a traceback would keep them alive."""
        return available(self._open_groups, "process groups exist until a run has failed")

    @property
    def relays(self) -> tuple[Relay, ...]:
        """Of this rank; one if the same ranks belong to both."""
        return tuple({id(relay): relay for relay in (self.pipe_relay, self.replica_relay)}.values())

    def _relay(self, ranks: tuple[int, ...]) -> Relay:
        control = self.groups.control if ranks == self.groups.pipe_ranks else self.groups.replica
        on_failure = self.failures.on_transfer
        transport = ProcessGroupTransport(
            ranks, control=control, channels={}, device=self.device, on_failure=on_failure
        )
        relay = Relay(transport)

        def abandon() -> None:
            relay.forget()
            transport.close()

        self.parts.add(relay.finish, abandon)
        return relay
