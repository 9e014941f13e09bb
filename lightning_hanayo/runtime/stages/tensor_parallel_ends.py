"""The gated stages: the first and the last one where the ranks of a cube hold each stage together.

    user code  |  border  |  gate  |  blocks  ...  blocks  |  gate  |  border  |  user code
    a thread                main thread                                         the thread again

The step suspends at its first block too: collectives are the main thread's, in the same order on all ranks. At a border
autograd's graph is cut, so a rank whose share counts for nothing plays the same backward on its side of it.
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
from lightning_hanayo.runtime.comm.message import Message, gradients, spread
from lightning_hanayo.runtime.comm.pytree import places, unflatten
from lightning_hanayo.runtime.stages.base import FirstStage, LastStage, detached
from lightning_hanayo.runtime.stages.boundary import BoundaryReshard, StageHooks


class GraphCut:
    """Where a graph is cut: tensors of one side, and leaves that stand for them on the other."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def cross(self, tensor: Tensor) -> Tensor:
        """What stands for `tensor` on the other side, always the same."""
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in self._pairs:
            self._pairs[id(tensor)] = tensor, tensor.detach().requires_grad_()
        return graph_boundary.alias(self._pairs[id(tensor)][1])

    @property
    def tensors(self) -> list[Tensor]:
        """Those that have crossed, on their own side."""
        return [tensor for tensor, _ in self._pairs.values()]

    def backward(self, *, always: bool = False) -> None:
        """Go on with the gradients that have reached the other side; `always`: with zeros where none has."""
        arrived = [
            torch.zeros_like(t) if always and leaf.grad is None else leaf.grad for t, leaf in self._pairs.values()
        ]
        graph_boundary.backward(self.tensors, arrived)


@dataclass(frozen=True)
class _Opened:
    """A micro-batch whose forward has passed stage 0."""

    border: GraphCut
    exits: list[Tensor]
    sequence_length: int


class TensorParallelFirstStage(FirstStage):
    """User code up to the stack, the gate, and the first blocks.

    Args:
        user: runs the user's step; none of the blocks.
        shared: as in `FirstStage`.
        queue: as in `Stage`.
        blocks: the stage's.
        gate: the cube's.
        streams: names of the arguments of blocks that are residual streams.
        surroundings: as in `Stage`.
    """

    def __init__(
        self,
        user: UserStep,
        shared: TiedGradients,
        queue: WeightGradientQueue,
        *,
        blocks: Sequence[nn.Module],
        gate: BoundaryReshard,
        streams: Sequence[str],
        surroundings: StageHooks,
    ) -> None:
        super().__init__(user, shared, queue, surroundings)
        self._blocks = list(blocks)
        self._gate = gate
        self._streams = frozenset(streams)
        self._opened: dict[int, _Opened] = {}

    @override
    def forward(self, batch: Batch, microbatch: int, arrived: Message | None) -> Message:
        border = GraphCut()
        entering = _Entering(self._user, self._gate, batch, microbatch, border)
        opening = entering.opening(self._streams_of)
        length = self._gate.sequence_length(microbatch)
        self._surroundings.before_forward(length)
        output = StageInput.of(opening).through(self._blocks[:1]).output
        rest = StageInput.of(entering.rest(output))
        self._surroundings.before_forward(length)
        leaving = replace(rest, sequence_length=length).behind(output, 0).through(self._blocks[1:]).packet
        if torch.is_grad_enabled():
            self._opened[microbatch] = _Opened(border, leaving.differentiable, length)
        return leaving

    @override
    def backward(self, batch: Batch, microbatch: int, arrived: Message | None) -> None:
        assert arrived is not None
        opened = self._opened.pop(microbatch)
        self._surroundings.before_backward(opened.sequence_length)
        graph_boundary.backward(opened.exits, spread(arrived))
        self._shared.second(microbatch, opened.border.backward)

    @override
    def leaves(self, microbatch: int) -> set[Tensor]:
        return graph_boundary.reach(self._opened[microbatch].border.tensors)[1]

    @override
    def clear(self) -> None:
        super().clear()
        self._opened.clear()

    def _streams_of(self, opening: Message) -> list[int]:
        """Which tensors of the first block's call are residual streams: found by the names of its arguments."""
        _, ((_, (_, *args), (_, *kwargs)),), _, _ = opening.skeleton
        names = list(inspect.signature(type(self._blocks[0]).forward).parameters)[1:]
        named = [*zip(names, args, strict=False), *((key[2], value) for key, value in kwargs)]
        return [place for name, tree in named if name in self._streams for place in places(tree)]


class _Entering:
    """One micro-batch's way through the gate: first the arguments of the first block, then those of all others.

    Where the ranks' arguments differ in structure (a mask on one, none on the other, whose samples aren't padded), the
    code before the stack is played again, for all samples that the blocks will work on.
    """

    def __init__(self, user: UserStep, gate: BoundaryReshard, batch: Batch, microbatch: int, border: GraphCut) -> None:
        self._user = user
        self._gate = gate
        self._batch = batch
        self._microbatch = microbatch
        self._border = border
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        self._rehearses = False

    def opening(self, streams_of: Callable[[Message], list[int]]) -> Message:
        """The first block's call, inside."""
        packet = self._user.open(self._batch, self._microbatch)
        streams = streams_of(packet)
        admitted = self._admit(packet, streams)
        if admitted is not None:
            return Message(packet.skeleton, tuple(admitted))
        inside = self._gate.shard_streams(self._microbatch, [self._border.cross(packet.tensors[i]) for i in streams])
        self._rehearses = True
        packet = self._user.rehearse(self._batch, self._microbatch)
        for i, tensor in zip(streams_of(packet), inside, strict=True):
            self._known[id(packet.tensors[i])] = packet.tensors[i], tensor
        return self._rehearsed(packet)

    def rest(self, output: Any) -> Message:
        """The calls of the other blocks, inside, after the first one has returned `output`."""
        packet = self._user.go_on(self._batch, self._microbatch, output)
        if not StageInput.of(packet).which:
            if self._rehearses:
                self._user.rehearse_on(self._batch, self._microbatch, output)
            return packet
        admitted = None if self._rehearses else self._admit(packet, [])
        if admitted is not None:
            return Message(packet.skeleton, tuple(admitted))
        if not self._rehearses:
            self._user.rehearse(self._batch, self._microbatch)
        return self._rehearsed(self._user.rehearse_on(self._batch, self._microbatch, output))

    def _rehearsed(self, packet: Message) -> Message:
        """What a rehearsal has made, with the true streams in it. It is no part of a graph.

        Raises:
            UnsupportedError: a block's argument has a gradient.
        """
        fresh = [tensor for tensor in packet.tensors if id(tensor) not in self._known]
        if any(tensor.requires_grad for tensor in fresh):
            raise UnsupportedError(
                "the arguments of the blocks differ between samples of one micro-batch (a mask for some, none for "
                "others), and one of them has a gradient. Pass masks always, or set cube_outside='replicate'."
            )
        known = (self._known.get(id(tensor), (tensor, tensor)) for tensor in packet.tensors)
        return Message(packet.skeleton, tuple(inside for _, inside in known))

    def _admit(self, packet: Message, streams: list[int]) -> list[Tensor] | None:
        fresh = [i for i, tensor in enumerate(packet.tensors) if id(tensor) not in self._known]
        where = {place: i for i, place in enumerate(fresh)}
        crossed = [self._border.cross(packet.tensors[i]) for i in fresh]
        inside = self._gate.shard_arguments(self._microbatch, crossed, [where[i] for i in streams], packet.skeleton)
        if inside is None:
            return None
        for i, tensor in zip(fresh, inside, strict=True):
            self._known[id(packet.tensors[i])] = packet.tensors[i], tensor
        return [self._known[id(tensor)][1] for tensor in packet.tensors]


class TensorParallelLastStage(LastStage):
    """Blocks, the gate, and user code behind the stack.

    Args:
        blocks: as in `LastStage`, and so are all that aren't named here.
        gate: the cube's.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        user: UserStep,
        first: FirstStage,
        shared: TiedGradients,
        queue: WeightGradientQueue,
        *,
        gate: BoundaryReshard,
        surroundings: StageHooks,
    ) -> None:
        super().__init__(blocks, user, first, shared, queue, surroundings)
        self._gate = gate
        self._left: dict[int, tuple[DetachedInputs, GraphCut, int, int]] = {}

    @override
    def forward(self, batch: Batch, microbatch: int, arrived: Message | None) -> None:
        assert arrived is not None
        entrance, border = DetachedInputs(arrived), GraphCut()
        cargo = StageInput.of(entrance.packet)
        self._surroundings.before_forward(cargo.sequence_length)
        cargo = cargo.through(self._blocks)
        released = [border.cross(self._gate.unshard_output(microbatch, tensor)) for tensor in cargo.packet.tensors]
        output = unflatten(cargo.packet.skeleton[0], released)
        batch.results[microbatch], mark = self._user.close(batch, microbatch, output)
        if torch.is_grad_enabled():
            self._left[microbatch] = entrance, border, mark, cargo.sequence_length

    @override
    def backward(self, batch: Batch, microbatch: int, arrived: Message | None) -> Message:
        entrance, border, mark, sequence_length = self._left.pop(microbatch)
        if batch.loss_weights[microbatch]:
            self._run_backward(batch, microbatch, set(), mark)
        batch.results[microbatch] = detached(batch.results[microbatch])
        self._surroundings.before_backward(sequence_length)
        border.backward(always=True)
        return gradients(entrance.gradients)

    @override
    def clear(self) -> None:
        super().clear()
        self._left.clear()
