"""The cube: what the ranks that hold each stage together do beside a pipeline rank that is alone with it.

setup       layers of the blocks become 3-D ones, everything else is cut over the cube
a batch     each rank plays its share of it; dense parameters are whole meanwhile
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from lightning_hanayo.runtime.autograd.weight_gradient_queue import WeightGradientQueue
from lightning_hanayo.strategy.build.process_groups import CubeGroups, objects
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.sharing import Replicated, Shared, Sharing
from lightning_hanayo.tensor3d.boundary.outside_parameters import OutsideParameters
from lightning_hanayo.tensor3d.boundary.reshard import ReplicatedReshard, Residual, SharedReshard
from lightning_hanayo.tensor3d.boundary.admission import Admission
from lightning_hanayo.tensor3d.stage_context import StageContext
from lightning_hanayo.tensor3d.sharding import Shard
from lightning_hanayo.tensor3d.stage_hooks import TensorParallelHooks
from lightning_hanayo.tensor3d.convert.parallelize import ParallelizePlan


class Cube:
    """One rank's part in its cube. Made once: a second run of the same strategy finds the layers swapped already.

    Args:
        team: the ranks.
        plan: what becomes of the blocks.
        options: how it is used.
    """

    def __init__(self, team: CubeGroups, plan: ParallelizePlan, options: Options) -> None:
        self.plan = plan
        self.grid = team.grid
        self._options = options
        residual = Residual(plan.batch_dim, plan.sequence_dim) if plan.known else None
        shares = options.cube_outside == "share"
        gate = (SharedReshard if shares else ReplicatedReshard)(self.grid, residual)
        self.passage = Admission(gate, partial(objects, team.plane))
        self.sharing: Sharing = (
            Shared(self.grid, self.passage, partial(objects, team.whole))
            if shares
            else Replicated(self.grid, self.passage)
        )
        self.queues: dict[int, WeightGradientQueue] = {}
        self._settings: dict[int, StageContext] = {}
        self.shards: dict[Tensor, Shard] = {}
        self.dense = OutsideParameters([], self.grid, {})

    def spread(
        self,
        blocks: Mapping[int, Sequence[nn.Module]],
        parameters: Sequence[nn.Parameter],
        outside: Sequence[nn.Module],
    ) -> None:
        """Spread this rank's stages over the cube. Called by all of its ranks.

        Args:
            blocks: of each stage, by its number.
            parameters: all that this rank holds.
            outside: the modules that aren't in the stack.
        """
        if self._settings:
            return
        for stage, own in blocks.items():
            self.queues[stage] = WeightGradientQueue()
            self._settings[stage] = StageContext(
                self.grid, self._options.cube_memory, self.queues[stage], num_pieces=self._options.cube_pieces
            )
            self.plan.install(own, self._settings[stage])
        for block in (block for own in blocks.values() for block in own):
            for module in block.modules():
                for name, shard in getattr(module, "shards", {}).items():
                    self.shards[module._parameters[name]] = shard  # type: ignore[index]
        alike: set[Tensor] = set()
        if self._options.cube_outside == "replicate":
            alike.update(parameter for module in outside for parameter in module.parameters(recurse=False))
        rest = [parameter for parameter in parameters if parameter not in self.shards]
        self.dense = OutsideParameters(rest, self.grid, dict.fromkeys(alike, 1 / self.grid.num_ranks))
        self.dense.cut()
        for parameter in rest:
            scalar = Shard((), "" if parameter in alike else "xyz")
            self.shards[parameter] = self.dense.shards.get(parameter, scalar)

    @property
    def place_outside(self) -> int:
        """This rank's place among those whose user code works on different samples."""
        return self.grid.index("xyz") if self._options.cube_outside == "share" else 0

    def surroundings(self, stage: int) -> TensorParallelHooks:
        """Of one of this rank's stages."""
        return TensorParallelHooks(self._settings.get(stage) or StageContext(self.grid))

    def partial(self, parameter: nn.Parameter) -> str:
        """The axes along which its gradient has still to be summed after a batch."""
        return self.shards[parameter].partial

    def replicas(self, parameter: Tensor) -> int:
        """How many ranks of the cube hold the same part of it."""
        return self.shards[parameter].replicas(self.grid)

    def whole(self, part: Tensor, parameter: Tensor) -> Tensor:
        """What the ranks' parts of something shaped as `parameter` make together, on the CPU. Called by all of them."""
        shard = self.shards[parameter]
        if tuple(part.shape) != shard.local_shape(self.grid) or not shard.axes:
            return part.detach().cpu()
        places = self.places
        shapes = [torch.Size(shard.local_shape(self.grid, place)) for place in places]
        flat = part.new_zeros(max(shape.numel() for shape in shapes))
        flat[: part.numel()] = part.detach().reshape(-1)
        whole = torch.empty(shard.shape, dtype=part.dtype)
        everything = self.grid.axis("xyz").all_gather(flat).wait().cpu()
        for place, shape, arrived in zip(places, shapes, everything, strict=True):
            shard.put(whole, arrived[: shape.numel()].view(shape), self.grid, place)
        return whole

    def part(self, whole: Tensor, parameter: Tensor, place: tuple[int, int, int] | None = None) -> Tensor:
        """The part at a place, this rank's if None, of something shaped as the whole parameter; else all of it."""
        shard = self.shards.get(parameter)
        if shard is None or tuple(whole.shape) != shard.shape or not shard.axes:
            return whole
        return shard.of(whole, self.grid, place)

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Of all ranks, in their order."""
        x, y, z = map(range, self.grid.sizes)
        return list(product(x, y, z))
