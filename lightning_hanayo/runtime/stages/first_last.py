"""The first and the last stage: they run the user's code before and after the stack, and know the loss."""

from collections.abc import Mapping, Sequence
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
from lightning_hanayo.runtime.capture.user_step import UserStep, missing_values_error
from lightning_hanayo.runtime.comm.message import Message, gradient_message, unpack_gradients
from lightning_hanayo.runtime.microbatches import with_values
from lightning_hanayo.runtime.stages.base import Stage
from lightning_hanayo.runtime.stages.boundary import StageHooks


class FirstStage(Stage):
    """User code up to the stack, and the first blocks.

    Args:
        user: runs the user's step, and in it the first blocks.
        tied: adds the gradients of parameters that the last stage uses too.
        queue: where the stage's layers leave their weight gradients.
        hooks: called before each forward and backward of the blocks.
    """

    def __init__(
        self, user: UserStep, tied: TiedGradients, queue: WeightGradientQueue, hooks: StageHooks | None = None
    ) -> None:
        super().__init__(queue, hooks)
        self.user = user
        self.tied = tied
        self._outputs: dict[int, list[Tensor]] = {}

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> Message:
        made = self.user.start(batch, microbatch)
        if torch.is_grad_enabled():
            self._outputs[microbatch] = made.differentiable
        return made

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        assert received is not None
        outputs, gradients = self._outputs.pop(microbatch), unpack_gradients(received)
        self.tied.first_stage_backward(microbatch, lambda: graph_boundary.run_backward(outputs, gradients))

    def used_parameters(self, microbatch: int) -> set[Tensor]:
        """The parameters that the code before the stack, and the first blocks, use."""
        return graph_boundary.reachable(self._outputs[microbatch])[1]

    @override
    def begin_batch(self) -> None:
        super().begin_batch()
        self._outputs.clear()


class LastStage(Stage):
    """Blocks, and user code after the stack, up to the loss.

    Args:
        blocks: the stage's; none, if the schedule has a loss stage.
        first: the first stage, which is on the same rank and starts the user's step.
        queue: where the stage's layers leave their weight gradients.
        hooks: called before each forward and backward of the blocks.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        first: FirstStage,
        queue: WeightGradientQueue,
        hooks: StageHooks | None = None,
    ) -> None:
        super().__init__(queue, hooks)
        self._blocks = list(blocks)
        self._first = first
        self._under_way: dict[int, tuple[DetachedInputs, set[Node], int]] = {}
        self._known_tied: dict[frozenset[Tensor], frozenset[Tensor]] = {}

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        assert received is not None
        inputs = DetachedInputs(received)
        after = StageInput.from_message(inputs.message).run(self._blocks)
        outputs = graph_boundary.nodes_of(after.message.differentiable)
        batch.results[microbatch], sequence_number = self._first.user.finish(batch, microbatch, after.output)
        if torch.is_grad_enabled():
            self._under_way[microbatch] = (inputs, outputs, sequence_number)

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> Message:
        inputs, outputs, sequence_number = self._under_way.pop(microbatch)
        self._loss_backward(batch, microbatch, outputs, sequence_number)
        return gradient_message(inputs.gradients)

    def _loss_backward(self, batch: Batch, microbatch: int, outputs: set[Node], sequence_number: int) -> None:
        """Run the backward of the weighted loss, and drop the graph of the step's result.

        Args:
            batch: has the result and the weight.
            microbatch: whose loss it is.
            outputs: the nodes that end the graph of the code after the stack.
            sequence_number: autograd's, when the step reached the stack: older nodes belong to the code before it.
        """
        if batch.loss_weights[microbatch]:  # with weight 0 not even a NaN counts: the mean over no tokens is one
            loss = loss_of(batch.results[microbatch])
            nodes, leaves = graph_boundary.reachable([loss], stop=outputs)
            uses_early_nodes = any(node._sequence_nr() < sequence_number for node in nodes)  # a skip past the stack
            weighted = loss * batch.loss_weights[microbatch]
            tied = self._tied_parameters(leaves, microbatch)
            with graph_boundary.without_autocast():
                self._first.tied.loss_backward(
                    microbatch, tied, lambda: weighted.backward(retain_graph=uses_early_nodes)
                )
        batch.results[microbatch] = detach_tree(batch.results[microbatch])

    @override
    def begin_batch(self) -> None:
        super().begin_batch()
        self._under_way.clear()

    def _tied_parameters(self, leaves: set[Tensor], microbatch: int) -> frozenset[Tensor]:
        """Those of the loss's parameters that the first stage uses too. Cached: its graph is large."""
        parameters = frozenset(leaf for leaf in leaves if isinstance(leaf, nn.Parameter))
        if parameters not in self._known_tied:
            self._known_tied[parameters] = parameters & self._first.used_parameters(microbatch)
        return self._known_tied[parameters]


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
        raise missing_values_error("the loss")
    return loss


def detach_tree(tree: Any) -> Any:
    """The tree with all its tensors detached."""
    if isinstance(tree, Tensor):
        return tree.detach()
    if type(tree) in (tuple, list):
        return type(tree)(map(detach_tree, tree))
    if isinstance(tree, Mapping):
        return with_values(tree, {key: detach_tree(value) for key, value in tree.items()})
    return tree
