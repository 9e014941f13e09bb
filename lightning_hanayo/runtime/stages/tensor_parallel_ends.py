"""The first and the last stage with tensor parallelism, where the ranks of a cube run each stage together.

    user code  |  graph cut  |  reshard  |  blocks  ...  blocks  |  reshard  |  graph cut  |  user code
    a thread                      the main thread                                             the thread again

All collectives run in the main thread, in the same order on all ranks. So the step is suspended at its first block too.
A graph cut divides autograd's graph in two. So inside, all ranks run the same backward, even a rank whose own samples
do not count in the loss.
"""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from lightning_hanayo.runtime.autograd import graph_boundary
from lightning_hanayo.runtime.autograd.graph_boundary import DetachedInputs, GraphCut
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.capture.carried import merged
from lightning_hanayo.runtime.capture.stage_input import StageInput
from lightning_hanayo.runtime.comm.message import Message, gradient_message, unpack_gradients
from lightning_hanayo.runtime.comm.pytree import tensor_indices
from lightning_hanayo.runtime.stages.first_last import FirstStage, LastStage
from lightning_hanayo.runtime.stages.sharded_calls import ShardedCalls
from lightning_hanayo.runtime.stages.tensor_parallel_protocols import BoundaryReshard


@dataclass(eq=False, repr=False, kw_only=True)
class TensorParallelFirstStage(FirstStage):
    """User code up to the stack, the reshard, and the first blocks. No block runs in the user's step."""

    blocks: Sequence[nn.Module]
    boundary: BoundaryReshard
    """converts the blocks' arguments to the layout inside the stack"""
    streams: Collection[str]
    """names of the blocks' arguments that are residual streams"""

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> Message:
        calls = ShardedCalls(self.user, self.boundary, batch, microbatch)
        first_call = calls.first(self._streams_of)
        length = self.boundary.sequence_length(microbatch)
        self.hooks.before_forward(length)
        first = StageInput.from_message(first_call).run(self.blocks[:1], self.carriers)
        others = StageInput.from_message(calls.others(first))
        self.hooks.before_forward(length)
        trees = merged(first.trees, others.trees)
        others = others._replace(sequence_length=length).after([first.output], 0, trees)
        made = others.run(self.blocks[1:], self.carriers).message
        if torch.is_grad_enabled():
            self._under_way[microbatch].append((calls.cut, graph_boundary.edges_of(made.differentiable), length))
        return made

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        assert received is not None
        under_way: tuple[GraphCut, list[GradientEdge], int] = self._under_way[microbatch].pop()
        cut, outputs, sequence_length = under_way
        self.hooks.before_backward(sequence_length)
        graph_boundary.run_backward(outputs, unpack_gradients(received))
        keeps = self._has_earlier_pass(microbatch)
        self.tied.first_stage_backward(microbatch, lambda: cut.backward(retain_graph=keeps))

    @override
    def used_parameters(self, microbatch: int) -> set[Tensor]:
        passes = self._under_way[microbatch]
        return graph_boundary.reachable(passes[-1][0].tensors)[1] if passes else set()

    def _streams_of(self, first_call: Message) -> list[int]:
        """The indices of the residual streams in the first block's call, found by the names of its arguments."""
        ((_, (_, *args), (_, *kwargs)),) = first_call.skeleton[1]
        names = list(inspect.signature(type(self.blocks[0]).forward).parameters)[1:]
        named = [*zip(names, args, strict=False), *((key[2], value) for key, value in kwargs)]
        return [index for name, tree in named if name in self.streams for index in tensor_indices(tree)]


@dataclass(eq=False, repr=False, kw_only=True)
class TensorParallelLastStage(LastStage):
    """Blocks, the reshard, and user code after the stack."""

    boundary: BoundaryReshard
    """converts the stack's output to the layout outside"""

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        assert received is not None
        inputs, cut = DetachedInputs(received), GraphCut()
        stage_input = StageInput.from_message(inputs.message)
        length = stage_input.sequence_length
        self.hooks.before_forward(length)
        made = stage_input.run(self.blocks, self.carriers).message
        whole = tuple(self.boundary.unshard_output(microbatch, tensor) for tensor in made.tensors)
        sequence_number = self._resume(batch, microbatch, cut, Message(made.skeleton, whole))
        if torch.is_grad_enabled():
            self._under_way[microbatch].append((inputs, cut, sequence_number, length))

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        under_way: tuple[DetachedInputs, GraphCut, int, int] | None = self._begin_backward(batch, microbatch)
        if under_way is None:
            return None
        inputs, cut, _, sequence_length = under_way
        self.hooks.before_backward(sequence_length)
        cut.backward(always=True)
        return gradient_message(inputs.gradients)
