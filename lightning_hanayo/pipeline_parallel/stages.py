"""The stages with user code: the first and the last one, and a single one that is both.

P > 1     rank 0   0F0 0F1 .... 3F0 3B0 ...      0F: the step, up to the stack    3F: the rest, up to the loss
P = 1     rank 0   0F0 0B0 0F1 0B1 ...           0F: the whole step               0B: the loss's backward
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.autograd import graph_boundary
from lightning_hanayo.runtime.autograd.graph_boundary import DetachedInputs, GraphCut
from lightning_hanayo.runtime.autograd.tied_gradients import TiedGradients
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.batches.containers import with_values
from lightning_hanayo.runtime.capture.stage_input import StageInput
from lightning_hanayo.runtime.capture.user_step import NONE_SKIPPED, UserStep, missing_values_error
from lightning_hanayo.runtime.comm.message import Message, gradient_message, unpack_gradients
from lightning_hanayo.runtime.stages.base import Stage


@dataclass(eq=False, repr=False, kw_only=True)
class FirstStage(Stage):
    """User code up to the stack, and the first blocks.

    With several passes, those of the later ones run in the step's thread when the last stage resumes it.
    """

    user: UserStep
    """runs the user's step, and in it the first blocks"""
    tied: TiedGradients
    """adds the gradients of parameters that the last stage uses too"""

    @override
    def begin_batch(self) -> None:
        super().begin_batch()
        self.user.begin_batch()
        self.tied.begin_batch()

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> Message:
        made = self.user.begin_pass(batch, microbatch)
        if torch.is_grad_enabled():
            self._under_way[microbatch].append(graph_boundary.edges_of(made.differentiable))
        return made

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        assert received is not None
        outputs: list[GradientEdge] = self._under_way[microbatch].pop()
        gradients, keeps = unpack_gradients(received), self._has_earlier_pass(microbatch)
        self.tied.first_stage_backward(
            microbatch, lambda: graph_boundary.run_backward(outputs, gradients, retain_graph=keeps)
        )

    def used_parameters(self, microbatch: int) -> set[Tensor]:
        """The parameters that the code before the stack, and the first blocks, use."""
        return graph_boundary.reachable(self._under_way[microbatch][-1])[1]

    def has_backward(self, microbatch: int) -> bool:
        """Whether a backward of this stage is to come."""
        return bool(self._under_way[microbatch])

    def _has_earlier_pass(self, microbatch: int) -> bool:
        """Whether the backward of an earlier pass comes later: what both use stays in memory until then."""
        return bool(self._under_way[microbatch])


@dataclass(eq=False, repr=False, kw_only=True)
class LastStage(Stage):
    """Blocks, and user code after the stack, up to the loss."""

    blocks: Sequence[nn.Module]
    """none, if the schedule has a loss stage"""
    first: FirstStage
    """is on the same rank, and starts the user's step"""
    _known_tied: dict[frozenset[Tensor], frozenset[Tensor]] = field(default_factory=dict, init=False)

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        assert received is not None
        inputs, cut = DetachedInputs(received), GraphCut()
        made = StageInput.from_message(inputs.message).run(self.blocks, self.carriers).message
        sequence_number = self._resume(batch, microbatch, cut, made)
        if torch.is_grad_enabled():
            self._under_way[microbatch].append((inputs, cut, sequence_number))

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        under_way: tuple[DetachedInputs, GraphCut, int] | None = self._begin_backward(batch, microbatch)
        if under_way is None:
            return None
        inputs, cut, _ = under_way
        cut.backward()
        return gradient_message(inputs.gradients)

    def _resume(self, batch: Batch, microbatch: int, cut: GraphCut, made: Message) -> int:
        """Resume the step with what the stack has made, cut off its graph; return autograd's sequence number there."""
        after = StageInput.from_message(Message(made.skeleton, tuple(map(cut.cut, made.tensors))))
        return self.first.user.resume(batch, microbatch, after.output, after.trees)

    def _begin_backward(self, batch: Batch, microbatch: int) -> Any:
        """Run the loss's backward, unless that of a later pass has; return what its forward has left.

        None where no pass of the step has gradients.
        """
        passes = self._under_way[microbatch]
        outputs = {node for _, cut, *_ in passes for node in cut.nodes}
        under_way = passes.pop() if passes else None
        if batch.has_loss:
            self.first.user.check_ended(batch, microbatch)
            self._loss_backward(batch, microbatch, outputs, under_way[2] if under_way else 0)
        return under_way

    def _loss_backward(self, batch: Batch, microbatch: int, outputs: set[Node], sequence_number: int) -> None:
        """Run the backward of the weighted loss up to the stack, and drop the graph of the step's result.

        `outputs` are the nodes with which the graph of the code after a pass begins. Nodes older than autograd's
        `sequence_number` belong to the code before the last pass.
        """
        if batch.loss_weights[microbatch]:  # with weight 0 not even a NaN counts: the mean over no tokens is one
            loss = loss_of(batch.results[microbatch])
            batch.on_loss(microbatch, loss, outputs)
            nodes, leaves = graph_boundary.reachable([loss], stop=outputs)
            uses_early_nodes = any(node._sequence_nr() < sequence_number for node in nodes)  # a skip past the stack
            weighted = batch.weighted(microbatch, loss)
            tied = self._tied_parameters(leaves, microbatch)
            with graph_boundary.without_autocast():
                self.first.tied.loss_backward(
                    microbatch, tied, lambda: weighted.backward(retain_graph=uses_early_nodes)
                )
        batch.results[microbatch] = detach_tree(batch.results[microbatch])

    def _tied_parameters(self, leaves: set[Tensor], microbatch: int) -> frozenset[Tensor]:
        """Those of the loss's parameters that the first stage uses too. Cached: its graph is large.

        None where the first stage has no backward to come, since no pass of the step has gradients.
        """
        if not self.first.has_backward(microbatch):
            return frozenset()
        parameters = frozenset(leaf for leaf in leaves if isinstance(leaf, nn.Parameter))
        if parameters not in self._known_tied:
            self._known_tied[parameters] = parameters & self.first.used_parameters(microbatch)
        return self._known_tied[parameters]


@dataclass(eq=False, repr=False, kw_only=True)
class SingleStage(Stage):
    """The whole of the user's step, on one rank. Nothing is suspended, recorded or sent, as in plain PyTorch."""

    user: UserStep

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        batch.results[microbatch] = self.user.run(batch, microbatch)

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        loss = find_loss(batch.results[microbatch])  # None: skipped, or refused by the Trainer
        if batch.has_loss and loss is not None and batch.loss_weights[microbatch]:  # 0: not even a NaN counts
            batch.on_loss(microbatch, loss, ())
            with graph_boundary.without_autocast():
                torch.autograd.backward(batch.weighted(microbatch, loss))  # Lightning calls the loss's method
        batch.results[microbatch] = detach_tree(batch.results[microbatch])


def find_loss(result: Any) -> Tensor | None:
    """The loss in what a training_step returned, if there is one."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    return loss if isinstance(loss, Tensor) else None


def loss_of(result: Any) -> Tensor:
    """The loss in what a training_step returned.

    Raises:
        UnsupportedError: there is none, or it depends on parameters of other pipeline ranks.
    """
    loss = find_loss(result)
    if loss is None:
        raise UnsupportedError(
            f"training_step returned {type(result).__name__}; a pipeline needs a loss from every micro-batch: a "
            f"tensor, or a dictionary with the key 'loss'." + (f" By None {NONE_SKIPPED}" if result is None else "")
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
