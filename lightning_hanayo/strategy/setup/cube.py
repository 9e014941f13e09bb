"""One rank's part in its cube: the ranks that hold each stage together by 3-D tensor parallelism.

setup       layers of the blocks become 3-D parallel, all other parameters are sharded over the cube
a batch     each rank runs user code on its share of it; parameters outside the stack are whole meanwhile
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.errors import available
from lightning_hanayo.partial_values import PartialParameter
from lightning_hanayo.partition import guards
from lightning_hanayo.pipeline_parallel.comm.object_collectives import all_gather_objects
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.stages import Stage
from lightning_hanayo.pipeline_parallel.tp_stages import DryFirstBlock, TensorParallelFirstStage
from lightning_hanayo.strategy.batch_split import BatchSplitter, ReplicatedSplitter, SharedSplitter
from lightning_hanayo.strategy.groups import CubeGroups
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.tensor_parallel.boundary import MicrobatchReshard, ReplicatedReshard, SharedReshard, StreamDims
from lightning_hanayo.tensor_parallel.convert.parallelize import ParallelizePlan
from lightning_hanayo.tensor_parallel.outside_parameters import OutsideParameters
from lightning_hanayo.tensor_parallel.outside_vocabulary import VocabularyWeight, vocabulary_weights
from lightning_hanayo.tensor_parallel.sharding import Shard, all_gather_whole, shards_of
from lightning_hanayo.tensor_parallel.stage_context import StageContext


class Cube:
    """Made once per module and layout: a second run finds the layers converted."""

    def __init__(self, groups: CubeGroups, plan: ParallelizePlan, options: Options, device: torch.device) -> None:
        self.plan = plan
        self._device = device
        self.mesh = groups.mesh
        self.queue = groups.queue
        """of the run that made the layers: theirs in later runs, too"""
        self._open_groups: CubeGroups | None = groups
        self._options = options
        self.shares_samples = options.cube_outside == "share"
        """whether each rank runs user code on samples of its own, unless the step runs once on a whole batch"""
        stream_dims = StreamDims(plan.batch_dim, plan.sequence_dim) if plan.is_registered else None
        self.whole_boundary = self._boundary(ReplicatedReshard(self.mesh, stream_dims, options.batch_dim))
        """where user code runs on all ranks alike"""
        self.whole_splitter = ReplicatedSplitter(options.batch_rule, self.mesh, self.whole_boundary)
        self.boundary = self.whole_boundary
        self.splitter: BatchSplitter = self.whole_splitter
        if self.shares_samples:
            self.boundary = self._boundary(SharedReshard(self.mesh, stream_dims, options.batch_dim))
            self.splitter = SharedSplitter(options.batch_rule, self.mesh, self.boundary, self.all_gather)
        self.queues: dict[int, WeightGradientQueue] = {}
        self.outside = OutsideParameters(self.mesh)
        self._contexts: dict[int, StageContext] = {}
        self._shards: dict[Tensor, Shard] = {}
        self._whole_in_steps: set[Tensor] = set()

    def parallelize(self, blocks: Mapping[int, Sequence[nn.Module]], parameters: Sequence[nn.Parameter]) -> None:
        """Shard the parameters of this rank's stages that aren't sharded yet. Called by all ranks of the cube.

        Args:
            blocks: of each stage, by its number.
            parameters: all that this rank holds.
        """
        for stage, own in blocks.items():
            if stage not in self._contexts:
                self._convert(stage, own)
        others = [p for p in parameters if p not in self._shards]
        self.outside.shard(others)
        for parameter in others:
            self._shards[parameter] = self.outside.shards.get(parameter, Shard((), "xyz"))
        self._whole_in_steps.update(others)

    def add_copies(self, originals: Mapping[Tensor, Tensor]) -> None:
        """Treat parameters of a copy of the model as those that they were copied from. `originals`: these, by copy."""
        self._shards.update({copied: self._shards[own] for copied, own in originals.items() if own in self._shards})

    def drop_copies(self, copies: Iterable[Tensor]) -> None:
        """Forget them."""
        for copied in copies:
            self._shards.pop(copied, None)

    def close(self) -> None:
        """The run has ended: refuse calls of the 3-D layers, which would wait for other ranks."""
        if self.queue is not None:
            self.queue.close()
        for context in self._contexts.values():
            context.closed = (
                f"a block with 3-D layers was called, but its run has ended: rank {self.mesh.index('xyz')} of the cube "
                f"{self.mesh.sizes} holds parts of its weights. {guards.WAY_OUT}"
            )

    def open(self) -> None:
        """The next run begins."""
        for context in self._contexts.values():
            context.closed = ""

    def disconnect(self) -> None:
        """After a failure: drop all process groups."""
        self._open_groups = None
        if self.queue is not None:
            self.queue.cancel()
            self.queue.close(timeout=0)
        self.mesh.disconnect(
            "the run of this model on a cube of ranks has failed. Build it anew, and load a checkpoint."
        )

    @property
    def sample_rank(self) -> int:
        """This rank's number among those whose user code works on different samples."""
        return self.mesh.index("xyz") if self.shares_samples else 0

    @property
    def keeps_layout(self) -> bool:
        """Whether tensors between a block's layers are as outside the stack: own samples, all features."""
        return self.shares_samples and not self.plan.is_registered

    def first_block(self, stage: Stage) -> DryFirstBlock:
        """Runs the first block of that stage in dry runs, on samples that all ranks of the cube have."""
        assert isinstance(stage, TensorParallelFirstStage)
        reshard: SharedReshard | ReplicatedReshard = self.boundary.reshard
        if reshard.stream_dims is not None:
            reshard = ReplicatedReshard(self.mesh, reshard.stream_dims, reshard.batch_dim)
        return DryFirstBlock(stage, self._boundary(reshard))

    def stage_hooks(self, stage: int) -> StageContext:
        """The hooks that run before each forward and backward of a stage's blocks."""
        return self._contexts.get(stage) or StageContext(self.mesh)

    def drop_transfers(self) -> None:
        """After a failure, when the process groups have been left: free what was under way."""
        for context in self._contexts.values():
            context.drop_transfers()

    def partial_axes(self, parameter: nn.Parameter) -> str:
        """The axes over which its gradient is still to be summed after a batch."""
        return self._shards[parameter].partial

    def num_replicas(self, parameter: Tensor) -> int:
        """How many ranks of the cube hold the same shard of it."""
        return self._shards[parameter].replicas(self.mesh)

    def replica(self, parameter: Tensor) -> int:
        """This rank's number among those that hold the same shard of it."""
        axes = self._shards[parameter].axes
        return self.mesh.index("".join(axis for axis in "xyz" if axis not in axes))

    def shard_of(self, parameter: Tensor) -> Shard:
        """How the ranks hold a parameter."""
        return self._shards[parameter]

    def sharded_axes(self, parameter: Tensor) -> str:
        """The axes over which it is sharded."""
        return self._shards[parameter].axes

    def region(self, parameter: Tensor) -> Region:
        """Which entries of the whole parameter this rank holds."""
        dims = self._shards[parameter].dims
        return Region.of_entries(
            range(*dim.span(self.mesh)) if dim.order is None else dim.entries_at(self.mesh).tolist() for dim in dims
        )

    @property
    def whole_shapes(self) -> dict[Tensor, tuple[int, ...]]:
        """The shapes of the parameters of which this rank holds a part."""
        return {parameter: shard.shape for parameter, shard in self._shards.items() if self.mesh.size(shard.axes) > 1}

    def own_rows(self, num_samples: int) -> int:
        """On how many of the samples of a whole batch generic blocks work here."""
        return self.whole_boundary.shares_of(num_samples)[self.mesh.index("xyz")].size

    def undo_in_copy(self, block: nn.Module, copied: nn.Module) -> dict[Tensor, tuple[int, ...]]:
        """Give the copy of a block its own layers again; return the whole shapes of the model's parameters."""
        self.plan.undo(dict(zip(block.modules(), copied.modules(), strict=True)))
        return self.whole_shapes

    def keep_vocabulary(self, modules: Iterable[nn.Module]) -> None:
        """Keep embeddings and heads among `modules` sharded while batches run. Steps must run on all ranks alike."""
        weights = [weight for weight in vocabulary_weights(modules) if weight in self.outside.shards]
        self.outside.kept_sharded = set(weights) if self.mesh.num_ranks > 1 else set()

    @property
    def parts_in_steps(self) -> Mapping[Tensor, type[nn.Parameter]]:
        """The parameters that user code can't use in a step as it is: values are parts, or gradients aren't summed.

        And the class that each has meanwhile.
        """
        parts = {one: PartialParameter for one in self._shards if one not in self._whole_in_steps}
        return parts | dict.fromkeys(self.outside.kept_sharded, VocabularyWeight)

    def adds_whole_gradient(self, parameter: Tensor) -> bool:
        """Whether this rank is the one that adds a complete gradient to one that is still to be summed over ranks."""
        return self.mesh.index(self._shards[parameter].partial) == 0

    def unshard(self, part: Tensor, parameter: Tensor) -> Tensor:
        """Gather the ranks' shards of something shaped as `parameter`, on the CPU. Called by all of them."""
        shard = self._shards[parameter]
        if tuple(part.shape) != shard.local_shape(self.mesh) or not shard.axes:
            return part.detach().cpu()
        on_device = part.detach().to(self._device)  # after a run Lightning has moved it to the CPU
        return all_gather_whole(on_device, shard, self.mesh, torch.device("cpu"))

    def shard(self, whole: Tensor, parameter: Tensor, place: tuple[int, int, int] | None = None) -> Tensor:
        """The shard at mesh coordinates (this rank's if None) of something shaped as the whole parameter; else all."""
        shard = self._shards.get(parameter)
        if shard is None or tuple(whole.shape) != shard.shape or not shard.axes:
            return whole
        return shard.of(whole, self.mesh, place)

    @property
    def _groups(self) -> CubeGroups:
        return available(self._open_groups, "process groups exist until a run has failed")

    def all_gather(self, value: Any) -> list[Any]:
        """Gather Python objects from all ranks of the cube, which call this."""
        return all_gather_objects(self._groups.whole, value, self.mesh.axis("xyz").group)

    def _boundary(self, reshard: SharedReshard | ReplicatedReshard) -> MicrobatchReshard:
        return MicrobatchReshard(
            reshard, lambda value: all_gather_objects(self._groups.plane, value), lambda value: self.all_gather(value)
        )

    def _convert(self, stage: int, blocks: Sequence[nn.Module]) -> None:
        queue = self.queues[stage] = WeightGradientQueue()
        context = self._contexts[stage] = StageContext(
            self.mesh,
            self._options.cube_memory,
            queue,
            num_pieces=self._options.cube_pieces,
            keep_weights=self._options.cube_weights == "batch",
            turns=None if self.queue is None else self.queue.turns,
        )
        self.plan.install(blocks, context)
        for module in (part for block in blocks for part in block.modules()):
            self._shards.update({module._parameters[name]: shard for name, shard in shards_of(module).items()})  # type: ignore[misc]
