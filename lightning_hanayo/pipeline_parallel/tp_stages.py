"""The first and the last stage where no block runs in the user's step: with tensor parallelism, where the ranks of a
cube run each stage together, and where the step runs once on a whole batch.

    user code  |  graph cut  |  reshard  |  blocks  ...  blocks  |  reshard  |  graph cut  |  user code
    a thread                      the main thread                                             the thread again

All collectives run in the main thread, in the same order on all ranks. So the step is suspended at its first block too,
whose calls are converted to the layout inside the stack. A graph cut divides autograd's graph in two. So inside, all
ranks run the same backward, even a rank whose own samples do not count in the loss.
"""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.autograd import graph_boundary
from lightning_hanayo.pipeline_parallel.autograd.graph_boundary import GraphCut
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture.carriers import merged
from lightning_hanayo.pipeline_parallel.capture.stage_input import StageInput, carried_of, is_block
from lightning_hanayo.pipeline_parallel.capture.whole_step import WholeStep
from lightning_hanayo.pipeline_parallel.message import Message, unpack_gradients
from lightning_hanayo.pipeline_parallel.pytree import Flattener, tensor_indices, unflatten
from lightning_hanayo.pipeline_parallel.stages import FirstStage, NoReshard

if TYPE_CHECKING:
    from lightning_hanayo.tensor_parallel.boundary import MicrobatchReshard


@dataclass(eq=False)
class ShardedCalls:
    """The calls of one micro-batch's blocks, with arguments in the layout inside the stack.

    The arguments of the first block are converted first, then those of all others. If the ranks' arguments differ in
    structure (one has a mask, another has none, as its samples need no padding), the code before the stack runs again,
    as a dry run on all samples that this rank's blocks work on.
    """

    stage: "TensorParallelFirstStage"
    batch: Batch
    microbatch: int
    cut: GraphCut = field(default_factory=GraphCut)
    _inside: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """by id: a tensor outside (kept, so that its id stays its own), and the same inside"""
    _is_dry_run: bool = False

    def __post_init__(self) -> None:
        self.user, self.arguments = self.stage.user, self.stage.arguments
        self.boundary: Any = self.stage.boundary

    def first(self) -> Message:
        """The first block's call."""
        call = self.user.begin_pass(self.batch, self.microbatch)
        streams, _ = self.arguments(call)
        sharded = self._shard(call)
        if sharded is not None:
            return Message(call.skeleton, tuple(sharded))
        outside = [self.cut.cut(call.tensors[i]) for i in streams]
        inside = self.boundary.shard_streams(self.microbatch, outside)
        self._is_dry_run = True
        call = self._start_dry_run(call)
        for i, tensor in zip(self.arguments(call)[0], inside, strict=True):
            self._inside[id(call.tensors[i])] = call.tensors[i], tensor
        return self._from_dry_run(call)

    def others(self, after: StageInput) -> Message:
        """The calls of the other blocks, after the first one has run."""
        calls = self.user.run_to_last_block(self.batch, self.microbatch, after)
        if not StageInput.from_message(calls).call_of_block:
            if self._is_dry_run:
                self.user.finish_dry_run(self.batch, self.microbatch, after.output)
            return calls
        sharded = None if self._is_dry_run else self._shard(calls)
        if sharded is not None:
            return Message(calls.skeleton, tuple(sharded))
        if not self._is_dry_run:
            self._start_dry_run(calls)
        made = self.user.finish_dry_run(self.batch, self.microbatch, after.output)
        return self._from_dry_run(_with_carried(made, calls))

    def _start_dry_run(self, calls: Message) -> Message:
        """Run the code before the stack on all samples, with the carried values of the real `calls`.

        Raises:
            UnsupportedError: the steps of the cube's ranks set attributes that blocks read to different values.
        """
        if not self.boundary.agrees(self.microbatch, carried_of(calls)):
            raise UnsupportedError(
                "an attribute that blocks read is set in the step to different values on the ranks of a cube. Pass it "
                "to the blocks as an argument, set it in on_train_batch_start, or set cube_outside='replicate'."
            )
        return _with_carried(self.user.start_dry_run(self.batch, self.microbatch), calls)

    def _from_dry_run(self, calls: Message) -> Message:
        """The calls that a dry run has made, with the real residual streams. Its other tensors have no graph.

        Raises:
            UnsupportedError: a block's argument has a gradient.
        """
        new = [tensor for tensor in calls.tensors if id(tensor) not in self._inside]
        if any(tensor.requires_grad for tensor in new):
            raise UnsupportedError(
                "the arguments of the blocks differ between samples of one micro-batch (a mask for some, none for "
                "others), and one of them has a gradient. Pass masks always, or set cube_outside='replicate'."
            )
        pairs = (self._inside.get(id(tensor), (tensor, tensor)) for tensor in calls.tensors)
        return Message(calls.skeleton, tuple(inside for _, inside in pairs))

    def _shard(self, calls: Message) -> list[Tensor] | None:
        """All tensors of `calls` inside; None, on all ranks, where the ranks' arguments differ in structure."""
        new = [i for i, tensor in enumerate(calls.tensors) if id(tensor) not in self._inside]
        position = {index: i for i, index in enumerate(new)}
        outside = [self.cut.cut(calls.tensors[i]) for i in new]
        streams, masks = ([position[i] for i in found if i in position] for found in self.arguments(calls))
        dims = None
        if isinstance(self.user, WholeStep):
            dims = self.user.dims_of_parts(self.batch, [calls.tensors[i] for i in new])
        inside = self.boundary.shard_arguments(self.microbatch, outside, (streams, masks), calls.skeleton, dims)
        if inside is None:
            return None
        for i, tensor in zip(new, inside, strict=True):
            self._inside[id(calls.tensors[i])] = calls.tensors[i], tensor
        return [self._inside[id(tensor)][1] for tensor in calls.tensors]


def _with_carried(calls: Message, real: Message) -> Message:
    """The `calls` of a dry run with the real step's carried values, which have no tensors in a cube."""
    return Message((*calls.skeleton[:-1], carried_of(real)), calls.tensors)


@dataclass(eq=False, repr=False, kw_only=True)
class TensorParallelFirstStage(FirstStage):
    """User code up to the stack, the reshard, and the first blocks. No block runs in the user's step."""

    blocks: Sequence[nn.Module]
    boundary: "MicrobatchReshard | NoReshard"
    """converts the blocks' arguments to the layout inside the stack"""
    streams: Collection[str] = ()
    """names of the blocks' arguments that are residual streams"""
    masks: Collection[str] = ()
    """and of masks, which with two dimensions have none of samples"""

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> Message:
        calls = ShardedCalls(self, batch, microbatch)
        first_call = calls.first()
        self.hooks.before_forward(*self.boundary.sequence_lengths(microbatch))
        is_last = self.user.num_blocks == 1  # calls of others come later
        first = StageInput.from_message(first_call).run(self.blocks[:1], self.carriers, is_last=is_last)
        others = StageInput.from_message(calls.others(first))
        lengths = self.boundary.sequence_lengths(microbatch)
        self.hooks.before_forward(*lengths)
        trees = merged(first.trees, others.trees)
        others = others._replace(sequence_lengths=lengths).after([first.output], 0, trees)
        made = others.run(self.blocks[1:], self.carriers).message
        if torch.is_grad_enabled():
            self._under_way[microbatch].append((calls.cut, graph_boundary.edges_of(made.differentiable), lengths))
        return made

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        assert received is not None
        under_way: tuple[GraphCut, list[GradientEdge], tuple[int, ...]] = self._under_way[microbatch].pop()
        cut, outputs, sequence_lengths = under_way
        self.hooks.before_backward(*sequence_lengths)
        graph_boundary.run_backward(outputs, unpack_gradients(received))
        keeps = self.has_backward(microbatch)  # of an earlier pass
        self.tied.first_stage_backward(microbatch, lambda: cut.backward(retain_graph=keeps))
        self.user.end_backward(batch)

    @override
    def used_parameters(self, microbatch: int) -> set[Tensor]:
        return graph_boundary.reachable(self._under_way[microbatch][-1][0].tensors)[1]

    def arguments(self, calls: Message) -> tuple[list[int], list[int]]:
        """The indices of residual streams in calls of blocks, and of 2-D masks, found by the names of arguments."""
        names, named = list(inspect.signature(type(self.blocks[0]).forward).parameters)[1:], list[tuple[str, int]]()
        for _, (_, *args), (_, *kwargs) in filter(is_block, calls.skeleton[1]):
            trees = [*zip(names, args, strict=False), *((key[2], value) for key, value in kwargs)]
            named += [(name, index) for name, tree in trees for index in tensor_indices(tree)]
        streams = dict.fromkeys(i for name, i in named if name in self.streams)
        masks = dict.fromkeys(i for name, i in named if name in self.masks and calls.tensors[i].dim() == 2)
        return list(streams), list(masks)


@dataclass(eq=False)
class DryFirstBlock:
    """Runs the first block in dry runs, for which all ranks of a cube have the same samples, and call it together."""

    stage: TensorParallelFirstStage
    boundary: "MicrobatchReshard"

    def __call__(self, call: Message, num_samples: int) -> Any:
        """Run it, and return its output outside."""
        stage, boundary = self.stage, self.boundary
        boundary.begin([boundary.shares_of(num_samples)])
        inside = boundary.shard_arguments(0, call.tensors, stage.arguments(call), call.skeleton)
        assert inside is not None
        lengths = boundary.sequence_lengths(0)
        stage.hooks.before_forward(*lengths)
        given = StageInput.from_message(Message(call.skeleton, tuple(inside)))._replace(sequence_lengths=lengths)
        flattener = Flattener()
        output = given.run(stage.blocks[:1], is_last=stage.user.num_blocks == 1).output
        skeleton = flattener.flatten(output, "the output of a block")
        return unflatten(skeleton, boundary.unshard_outputs(0, flattener.tensors))
