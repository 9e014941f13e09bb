"""The stage: one piece of the stack on one pipeline rank, and what forward and backward of a micro-batch mean there.

FirstStage    user code up to the stack, and the first blocks        runs in the step's thread, suspends
MiddleStage   blocks
LastStage     blocks (none, if the schedule has a loss stage), and user code behind the stack, up to the loss
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.autograd import graph_boundary
from lightning_hanayo.runtime.autograd.graph_boundary import DetachedInputs
from lightning_hanayo.runtime.autograd.tied_gradients import TiedGradients
from lightning_hanayo.runtime.autograd.weight_gradient_queue import WeightGradientQueue
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.capture.stage_input import StageInput
from lightning_hanayo.runtime.capture.user_step import UserStep, without_values
from lightning_hanayo.runtime.comm.message import Message, gradients, spread
from lightning_hanayo.runtime.microbatches import with_values
from lightning_hanayo.runtime.stages.boundary import NoHooks, StageHooks
from lightning_hanayo.schedule import Kind

Run = Callable[[Batch, int, Message | None], Message | None]
"""Runs one action of a micro-batch: takes the packet that has arrived, returns the one that leaves."""


class Stage(ABC):
    """What the engine plays. Packets are cargo forward, and the gradients of its differentiable tensors backward.

    Args:
        queue: where the stage's layers leave their weight gradients while the backward is split.
        surroundings: what the blocks find around them.
    """

    def __init__(self, queue: WeightGradientQueue, surroundings: StageHooks | None = None) -> None:
        self._queue = queue
        self._surroundings = surroundings or NoHooks()

    def runs(self) -> dict[Kind, Run]:
        """What each kind of action means here."""
        return {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.backward_input, Kind.W: self.backward_weight}

    @abstractmethod
    def forward(self, batch: Batch, microbatch: int, arrived: Message | None) -> Message | None:
        """Run the stage; `arrived` is None in the first one, and the last one returns None."""

    @abstractmethod
    def backward(self, batch: Batch, microbatch: int, arrived: Message | None) -> Message | None:
        """Run the stage's whole backward; `arrived` is None in the last one, and the first one returns None."""

    def backward_input(self, batch: Batch, microbatch: int, arrived: Message | None) -> Message | None:
        """As `backward`, but what layers can leave for `backward_weight` stays in the queue."""
        with self._queue.opened(microbatch):
            return self.backward(batch, microbatch, arrived)

    def backward_weight(self, batch: Batch, microbatch: int, arrived: Message | None) -> None:
        """Make the weight gradients that `backward_input` left; nothing arrives for it."""
        self._queue.drain(microbatch)

    def clear(self) -> None:
        """Forget the micro-batches of the batch before: an evaluated or failed one has left some."""
        self._queue.clear()
        self._surroundings.begin_batch()

    def end(self) -> None:
        """The batch is over, and the optimizer may change the weights: forget what layers keep of them."""
        self._queue.clear()


class MiddleStage(Stage):
    """Blocks alone."""

    def __init__(
        self, blocks: Sequence[nn.Module], queue: WeightGradientQueue, surroundings: StageHooks | None = None
    ) -> None:
        super().__init__(queue, surroundings)
        self._blocks = list(blocks)
        self._under_way: dict[int, tuple[DetachedInputs, list[Tensor], int]] = {}

    @override
    def forward(self, batch: Batch, microbatch: int, arrived: Message | None) -> Message:
        assert arrived is not None
        entrance = DetachedInputs(arrived)
        cargo = StageInput.of(entrance.packet)
        self._surroundings.before_forward(cargo.sequence_length)
        leaving = cargo.through(self._blocks).packet
        if torch.is_grad_enabled():
            self._under_way[microbatch] = (entrance, leaving.differentiable, cargo.sequence_length)
        return leaving

    @override
    def backward(self, batch: Batch, microbatch: int, arrived: Message | None) -> Message:
        assert arrived is not None
        entrance, exits, sequence_length = self._under_way.pop(microbatch)
        self._surroundings.before_backward(sequence_length)
        graph_boundary.backward(exits, spread(arrived))
        return gradients(entrance.gradients)

    @override
    def clear(self) -> None:
        super().clear()
        self._under_way.clear()


class FirstStage(Stage):
    """User code up to the stack, and the first blocks."""

    def __init__(
        self, user: UserStep, shared: TiedGradients, queue: WeightGradientQueue, surroundings: StageHooks | None = None
    ) -> None:
        super().__init__(queue, surroundings)
        self._user = user
        self._shared = shared
        self._exits: dict[int, list[Tensor]] = {}

    @override
    def forward(self, batch: Batch, microbatch: int, arrived: Message | None) -> Message:
        leaving = self._user.open(batch, microbatch)
        if torch.is_grad_enabled():
            self._exits[microbatch] = leaving.differentiable
        return leaving

    @override
    def backward(self, batch: Batch, microbatch: int, arrived: Message | None) -> None:
        assert arrived is not None
        exits = self._exits.pop(microbatch)
        self._shared.second(microbatch, lambda: graph_boundary.backward(exits, spread(arrived)))

    def leaves(self, microbatch: int) -> set[Tensor]:
        """The parameters that the code before the stack, and the first blocks, use."""
        return graph_boundary.reach(self._exits[microbatch])[1]

    @override
    def clear(self) -> None:
        super().clear()
        self._exits.clear()


class LastStage(Stage):
    """Blocks, and user code behind the stack."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        user: UserStep,
        first: FirstStage,
        shared: TiedGradients,
        queue: WeightGradientQueue,
        surroundings: StageHooks | None = None,
    ) -> None:
        super().__init__(queue, surroundings)
        self._blocks = list(blocks)
        self._user = user
        self._first = first
        self._shared = shared
        self._under_way: dict[int, tuple[DetachedInputs, set[Node], int]] = {}
        self._known_shared: dict[frozenset[Tensor], frozenset[Tensor]] = {}

    @override
    def forward(self, batch: Batch, microbatch: int, arrived: Message | None) -> None:
        assert arrived is not None
        entrance = DetachedInputs(arrived)
        cargo = StageInput.of(entrance.packet).through(self._blocks)
        outputs = graph_boundary.nodes_of(cargo.packet.differentiable)
        batch.results[microbatch], mark = self._user.close(batch, microbatch, cargo.output)
        if torch.is_grad_enabled():
            self._under_way[microbatch] = (entrance, outputs, mark)

    @override
    def backward(self, batch: Batch, microbatch: int, arrived: Message | None) -> Message:
        entrance, outputs, mark = self._under_way.pop(microbatch)
        if batch.loss_weights[microbatch]:  # without a share, not even a NaN counts: the mean of no tokens is one
            self._run_backward(batch, microbatch, outputs, mark)
        batch.results[microbatch] = detached(batch.results[microbatch])
        return gradients(entrance.gradients)

    def _run_backward(self, batch: Batch, microbatch: int, outputs: set[Node], mark: int) -> None:
        loss = loss_of(batch.results[microbatch])
        nodes, leaves = graph_boundary.reach([loss], stop=outputs)
        early = any(node._sequence_nr() < mark for node in nodes)  # a skip connection past the stack, a penalty
        weighted = loss * batch.loss_weights[microbatch]
        shared = self._shared_among(leaves, microbatch)
        with graph_boundary.without_autocast():
            self._shared.first(microbatch, shared, lambda: weighted.backward(retain_graph=early))

    @override
    def clear(self) -> None:
        super().clear()
        self._under_way.clear()

    def _shared_among(self, leaves: set[Tensor], microbatch: int) -> frozenset[Tensor]:
        """Those of the loss's parameters that stage 0 uses too: found once, for its graph is the larger one."""
        parameters = frozenset(leaf for leaf in leaves if isinstance(leaf, nn.Parameter))
        if parameters not in self._known_shared:
            self._known_shared[parameters] = parameters & self._first.leaves(microbatch)
        return self._known_shared[parameters]


def loss_of(result: Any) -> Tensor:
    """The loss in what a training_step returned.

    Raises:
        UnsupportedError: there is none, or it depends on parameters of other pipeline ranks.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise UnsupportedError(
            f"training_step returned {type(result).__name__}; a pipeline needs a loss from every micro-batch: a "
            f"tensor, or a dictionary with the key 'loss'. Skipping a batch by returning None isn't possible."
        )
    if loss.is_meta:
        raise without_values("the loss")
    return loss


def detached(tree: Any) -> Any:
    """`tree` without its graph."""
    if isinstance(tree, Tensor):
        return tree.detach()
    if type(tree) in (tuple, list):
        return type(tree)(map(detached, tree))
    if isinstance(tree, Mapping):
        return with_values(tree, {key: detached(value) for key, value in tree.items()})
    return tree
