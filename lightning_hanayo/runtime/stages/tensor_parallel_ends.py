"""The first and the last stage with tensor parallelism, where the ranks of a cube run each stage together.

    user code  |  graph cut  |  reshard  |  blocks  ...  blocks  |  reshard  |  graph cut  |  user code
    a thread                      the main thread                                             the thread again

All collectives run in the main thread, in the same order on all ranks. So the step is suspended at its first block too.
At a cut autograd's graph is in two parts: each rank runs the same backward inside, also one whose own samples count for
nothing in the loss.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.autograd import graph_boundary
from lightning_hanayo.runtime.autograd.graph_boundary import DetachedInputs
from lightning_hanayo.runtime.autograd.tied_gradients import TiedGradients
from lightning_hanayo.runtime.autograd.weight_gradient_queue import WeightGradientQueue
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.capture.stage_input import StageInput
from lightning_hanayo.runtime.capture.user_step import UserStep
from lightning_hanayo.runtime.comm.message import Message, gradient_message, unpack_gradients
from lightning_hanayo.runtime.comm.pytree import tensor_indices, unflatten
from lightning_hanayo.runtime.stages.boundary import BoundaryReshard, StageHooks
from lightning_hanayo.runtime.stages.first_last import FirstStage, LastStage


class GraphCut:
    """Cuts autograd's graph: tensors of the earlier part, and the leaves of the later part that stand for them."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the same values in the later part; for the same tensor always from the same leaf."""
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in self._pairs:
            self._pairs[id(tensor)] = tensor, tensor.detach().requires_grad_()
        return graph_boundary.alias(self._pairs[id(tensor)][1])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that were cut, in the earlier part."""
        return [tensor for tensor, _ in self._pairs.values()]

    def backward(self, *, always: bool = False) -> None:
        """Run the earlier part's backward, with the gradients of the later part's leaves.

        Args:
            always: whether to run it with zeros for leaves without a gradient.
        """
        gradients = [
            torch.zeros_like(t) if always and leaf.grad is None else leaf.grad for t, leaf in self._pairs.values()
        ]
        graph_boundary.run_backward(self.tensors, gradients)


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
        calls = _ShardedCalls(self.user, self._boundary, batch, microbatch)
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


class _ShardedCalls:
    """The calls of one micro-batch's blocks, with arguments in the layout inside the stack.

    The arguments of the first block are converted first, then those of all others. If the ranks' arguments differ in
    structure (one has a mask, another has none, as its samples need no padding), the code before the stack runs again,
    as a dry run on all samples that this rank's blocks work on.
    """

    def __init__(self, user: UserStep, boundary: BoundaryReshard, batch: Batch, microbatch: int) -> None:
        self.cut = GraphCut()
        self._user = user
        self._boundary = boundary
        self._batch = batch
        self._microbatch = microbatch
        self._inside: dict[int, tuple[Tensor, Tensor]] = {}
        """by id: a tensor outside (kept, so that its id stays its own), and the same inside"""
        self._is_dry_run = False

    def first(self, streams_of: Callable[[Message], list[int]]) -> Message:
        """The first block's call."""
        call = self._user.start(self._batch, self._microbatch)
        streams = streams_of(call)
        sharded = self._shard(call, streams)
        if sharded is not None:
            return Message(call.skeleton, tuple(sharded))
        outside = [self.cut.cut(call.tensors[i]) for i in streams]
        inside = self._boundary.shard_streams(self._microbatch, outside)
        self._is_dry_run = True
        call = self._user.start_dry_run(self._batch, self._microbatch)
        for i, tensor in zip(streams_of(call), inside, strict=True):
            self._inside[id(call.tensors[i])] = call.tensors[i], tensor
        return self._from_dry_run(call)

    def others(self, output: Any) -> Message:
        """The calls of the other blocks, after the first one has returned `output`."""
        calls = self._user.run_to_last_block(self._batch, self._microbatch, output)
        if not StageInput.from_message(calls).call_of_block:
            if self._is_dry_run:
                self._user.finish_dry_run(self._batch, self._microbatch, output)
            return calls
        sharded = None if self._is_dry_run else self._shard(calls, [])
        if sharded is not None:
            return Message(calls.skeleton, tuple(sharded))
        if not self._is_dry_run:
            self._user.start_dry_run(self._batch, self._microbatch)
        return self._from_dry_run(self._user.finish_dry_run(self._batch, self._microbatch, output))

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

    def _shard(self, calls: Message, streams: list[int]) -> list[Tensor] | None:
        """All tensors of `calls` inside; None, on all ranks, where the ranks' arguments differ in structure."""
        new = [i for i, tensor in enumerate(calls.tensors) if id(tensor) not in self._inside]
        position = {index: i for i, index in enumerate(new)}
        outside = [self.cut.cut(calls.tensors[i]) for i in new]
        positions = [position[i] for i in streams]
        inside = self._boundary.shard_arguments(self._microbatch, outside, positions, calls.skeleton)
        if inside is None:
            return None
        for i, tensor in zip(new, inside, strict=True):
            self._inside[id(calls.tensors[i])] = calls.tensors[i], tensor
        return [self._inside[id(tensor)][1] for tensor in calls.tensors]


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
