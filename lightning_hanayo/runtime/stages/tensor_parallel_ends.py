"""The first and the last stage with tensor parallelism, where the ranks of a cube run each stage together.

    user code  |  graph cut  |  reshard  |  blocks  ...  blocks  |  reshard  |  graph cut  |  user code
    a thread                      the main thread                                             the thread again

All collectives run in the main thread, in the same order on all ranks. So the step is suspended at its first block too.
A graph cut divides autograd's graph in two. So inside, all ranks run the same backward, even a rank whose own samples
do not count in the loss.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.runtime.autograd import graph_boundary
from lightning_hanayo.runtime.autograd.graph_boundary import DetachedInputs, GraphCut
from lightning_hanayo.runtime.autograd.tied_gradients import TiedGradients
from lightning_hanayo.runtime.autograd.weight_gradient_queue import WeightGradientQueue
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.capture.stage_input import StageInput
from lightning_hanayo.runtime.capture.user_step import UserStep
from lightning_hanayo.runtime.comm.message import Message, gradient_message, unpack_gradients
from lightning_hanayo.runtime.comm.pytree import tensor_indices, unflatten
from lightning_hanayo.runtime.stages.boundary import BoundaryReshard, StageHooks
from lightning_hanayo.runtime.stages.first_last import FirstStage, LastStage
from lightning_hanayo.runtime.stages.sharded_calls import ShardedCalls


@dataclass(frozen=True)
class _FirstUnderWay:
    """A micro-batch between forward and backward of the first stage."""

    cut: GraphCut
    outputs: list[Tensor]
    sequence_length: int


class TensorParallelFirstStage(FirstStage):
    """User code up to the stack, the reshard, and the first blocks.

    Args:
        user: runs the user's step; no block runs in it.
        tied: adds the gradients of parameters that the last stage uses too.
        queue: where the stage's layers leave their weight gradients.
        blocks: the stage's.
        boundary: converts the blocks' arguments to the layout inside the stack.
        streams: names of the blocks' arguments that are residual streams.
        hooks: called before each forward and backward of the blocks.
    """

    def __init__(
        self,
        user: UserStep,
        tied: TiedGradients,
        queue: WeightGradientQueue,
        *,
        blocks: Sequence[nn.Module],
        boundary: BoundaryReshard,
        streams: Sequence[str],
        hooks: StageHooks,
    ) -> None:
        super().__init__(user, tied, queue, hooks)
        self._blocks = list(blocks)
        self._boundary = boundary
        self._streams = frozenset(streams)
        self._under_way: dict[int, _FirstUnderWay] = {}

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> Message:
        calls = ShardedCalls(self.user, self._boundary, batch, microbatch)
        first_call = calls.first(self._streams_of)
        length = self._boundary.sequence_length(microbatch)
        self._hooks.before_forward(length)
        output = StageInput.from_message(first_call).run(self._blocks[:1]).output
        others = StageInput.from_message(calls.others(output))
        self._hooks.before_forward(length)
        made = replace(others, sequence_length=length).after(output, 0).run(self._blocks[1:]).message
        if torch.is_grad_enabled():
            self._under_way[microbatch] = _FirstUnderWay(calls.cut, made.differentiable, length)
        return made

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        assert received is not None
        under_way = self._under_way.pop(microbatch)
        self._hooks.before_backward(under_way.sequence_length)
        graph_boundary.run_backward(under_way.outputs, unpack_gradients(received))
        self.tied.first_stage_backward(microbatch, under_way.cut.backward)

    @override
    def used_parameters(self, microbatch: int) -> set[Tensor]:
        return graph_boundary.reachable(self._under_way[microbatch].cut.tensors)[1]

    @override
    def begin_batch(self) -> None:
        super().begin_batch()
        self._under_way.clear()

    def _streams_of(self, first_call: Message) -> list[int]:
        """The indices of the residual streams in the first block's call, found by the names of its arguments."""
        _, ((_, (_, *args), (_, *kwargs)),), _, _ = first_call.skeleton
        names = list(inspect.signature(type(self._blocks[0]).forward).parameters)[1:]
        named = [*zip(names, args, strict=False), *((key[2], value) for key, value in kwargs)]
        return [index for name, tree in named if name in self._streams for index in tensor_indices(tree)]


@dataclass(frozen=True)
class _LastUnderWay:
    """A micro-batch between forward and backward of the last stage."""

    inputs: DetachedInputs
    cut: GraphCut
    sequence_number: int
    sequence_length: int


class TensorParallelLastStage(LastStage):
    """Blocks, the reshard, and user code after the stack.

    Args:
        blocks: the stage's.
        first: the first stage, which is on the same rank and starts the user's step.
        queue: where the stage's layers leave their weight gradients.
        boundary: converts the stack's output to the layout outside.
        hooks: called before each forward and backward of the blocks.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        first: FirstStage,
        queue: WeightGradientQueue,
        *,
        boundary: BoundaryReshard,
        hooks: StageHooks,
    ) -> None:
        super().__init__(blocks, first, queue, hooks)
        self._boundary = boundary
        self._sharded_under_way: dict[int, _LastUnderWay] = {}

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        assert received is not None
        inputs, cut = DetachedInputs(received), GraphCut()
        stage_input = StageInput.from_message(inputs.message)
        length = stage_input.sequence_length
        self._hooks.before_forward(length)
        made = stage_input.run(self._blocks).message
        whole = [cut.cut(self._boundary.unshard_output(microbatch, tensor)) for tensor in made.tensors]
        output = unflatten(made.skeleton[0], whole)
        batch.results[microbatch], sequence_number = self._first.user.finish(batch, microbatch, output)
        if torch.is_grad_enabled():
            self._sharded_under_way[microbatch] = _LastUnderWay(inputs, cut, sequence_number, length)

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> Message:
        under_way = self._sharded_under_way.pop(microbatch)
        self._loss_backward(batch, microbatch, set(), under_way.sequence_number)
        self._hooks.before_backward(under_way.sequence_length)
        under_way.cut.backward(always=True)
        return gradient_message(under_way.inputs.gradients)

    @override
    def begin_batch(self) -> None:
        super().begin_batch()
        self._sharded_under_way.clear()
