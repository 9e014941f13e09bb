"""The stage: one piece of the stack on one pipeline rank, with its forward and backward of a micro-batch.

FirstStage    user code up to the stack, and the first blocks        runs in the step's thread, which it suspends
MiddleStage   blocks
LastStage     blocks (none, if the schedule has a loss stage), and user code after the stack, up to the loss
SingleStage   the whole step, on one pipeline rank

With tensor parallelism several ranks run a stage together. Outside the stack each has its own samples, with all
features; inside it has shards. a `StageContext` is called around it; other stages have `NoHooks`.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.autograd import graph_boundary
from lightning_hanayo.pipeline_parallel.autograd.graph_boundary import DetachedInputs, GraphCut
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.batches.plan import with_values
from lightning_hanayo.pipeline_parallel.capture.carriers import NO_CARRIERS, Carriers
from lightning_hanayo.pipeline_parallel.capture.stage_input import StageInput
from lightning_hanayo.pipeline_parallel.capture.user_step import NONE_SKIPPED, UserStep, missing_values_error
from lightning_hanayo.pipeline_parallel.grad_sync import TiedGradients
from lightning_hanayo.pipeline_parallel.message import Message, gradient_message, unpack_gradients
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue

if TYPE_CHECKING:
    from lightning_hanayo.tensor_parallel.boundary import MicrobatchReshard
    from lightning_hanayo.tensor_parallel.stage_context import StageContext


class NoHooks:
    """The hooks of a stage on a single rank: they do nothing. In a cube its `StageContext` has the same methods.

    `begin_batch`, `end_batch`    around batches
    `before_forward`, `before_backward`    of a micro-batch, whose whole sequences had these lengths in its forward
    `expect_last_gradients`    before the stage's action that makes its last weight gradients
    `finish_gradients`    when the last one has been made: sums that are under way must end
    """

    allows_twins = True
    """whether two forwards, or two backwards, of the stage may run at once now"""
    keeps_weights = False
    """whether layers gather their weights once a batch, so that its first and last actions differ from others"""

    def before_forward(self, *sequence_lengths: int) -> None:
        """Do nothing."""

    begin_batch = expect_last_gradients = finish_gradients = end_batch = before_backward = before_forward


class NoReshard:
    """The boundary of a stack that one rank per stage holds: nothing is converted."""

    def shard_arguments(self, microbatch: int, tensors: Sequence[Tensor], *_: Any) -> list[Tensor]:
        """The tensors themselves."""
        return list(tensors)

    def unshard_outputs(self, microbatch: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors themselves."""
        return list(tensors)

    def sequence_lengths(self, microbatch: int) -> tuple[int, ...]:
        """None: no block asks for them."""
        return ()


@dataclass(eq=False, repr=False, kw_only=True)
class Stage(ABC):
    """Runs the actions of one stage. Forward messages are stage inputs, backward messages their gradients."""

    allows_twins: ClassVar[bool] = False
    """whether two forwards, or two backwards, may run at once: not where user code may see that"""

    queue: WeightGradientQueue
    """where the stage's layers leave their weight gradients while the backward is split"""
    hooks: "NoHooks | StageContext" = field(default_factory=NoHooks)
    """called before each forward and backward of the blocks"""
    carriers: Carriers = NO_CARRIERS
    """carry values that the step and the blocks store for each other"""
    _under_way: defaultdict[int, list[Any]] = field(default_factory=lambda: defaultdict(list), init=False)
    """by micro-batch: the forward's state for its backward; of several passes, the backward of the last is first"""

    @abstractmethod
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        """Run the forward; `received` is None in the first stage, and the last one returns None."""

    @abstractmethod
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        """Run the whole backward; `received` is None in the last stage, and the first one returns None."""

    def backward_input(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        """Run the backward, but let layers leave their weight gradients in the queue."""
        with self.queue.collecting(microbatch):
            return self.backward(batch, microbatch, received)

    def backward_weight(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        """Compute the weight gradients that `backward_input` has left; it needs no message."""
        self.queue.drain(microbatch)

    def begin_batch(self) -> None:
        """Forget the micro-batches of the batch before: an evaluation or a failure leaves some."""
        self.queue.clear()
        self.hooks.begin_batch()
        self._under_way.clear()

    def end_batch(self) -> None:
        """Let layers drop copies of their weights: the optimizer may change the weights now."""
        self.hooks.end_batch()
        self.queue.clear()


@dataclass(eq=False, repr=False, kw_only=True)
class MiddleStage(Stage):
    """Blocks without user code."""

    blocks: Sequence[nn.Module]

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        assert received is not None
        inputs = DetachedInputs(received)
        stage_input = StageInput.from_message(inputs.message)
        self.hooks.before_forward(*stage_input.sequence_lengths)
        made = stage_input.run(self.blocks, self.carriers).message
        if torch.is_grad_enabled():
            outputs = graph_boundary.edges_of(made.differentiable)
            self._under_way[microbatch].append((inputs, outputs, stage_input.sequence_lengths))
        return made

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        assert received is not None
        under_way: tuple[DetachedInputs, list[GradientEdge], tuple[int, ...]] = self._under_way[microbatch].pop()
        inputs, outputs, sequence_lengths = under_way
        self.hooks.before_backward(*sequence_lengths)
        graph_boundary.run_backward(outputs, unpack_gradients(received))
        return gradient_message(inputs.gradients)


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
        # parts of the graph that an earlier pass uses too stay in memory until its backward
        gradients, keeps = unpack_gradients(received), self.has_backward(microbatch)
        self.tied.first_stage_backward(
            microbatch, lambda: graph_boundary.run_backward(outputs, gradients, retain_graph=keeps)
        )

    def used_parameters(self, microbatch: int) -> set[Tensor]:
        """The parameters that the code before the stack, and the first blocks, use."""
        return graph_boundary.reachable(self._under_way[microbatch][-1])[1]

    def has_backward(self, microbatch: int) -> bool:
        """Whether a backward of this stage is to come: in a backward, that of an earlier pass."""
        return bool(self._under_way[microbatch])


@dataclass(eq=False, repr=False, kw_only=True)
class LastStage(Stage):
    """Blocks, in a cube the reshard, and user code after the stack, up to the loss."""

    blocks: Sequence[nn.Module]
    """none, if the schedule has a loss stage"""
    first: FirstStage
    """is on the same rank, and starts the user's step"""
    boundary: "MicrobatchReshard | NoReshard" = field(default_factory=NoReshard)
    """converts the stack's output to the layout outside"""
    _known_tied: dict[frozenset[Tensor], frozenset[Tensor]] = field(default_factory=dict, init=False)
    """of the loss's parameters those that the first stage uses, too"""

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        assert received is not None
        inputs, cut = DetachedInputs(received), GraphCut()
        stage_input = StageInput.from_message(inputs.message)
        lengths = stage_input.sequence_lengths
        self.hooks.before_forward(*lengths)
        made = stage_input.run(self.blocks, self.carriers).message
        whole = self.boundary.unshard_outputs(microbatch, made.tensors)
        after = StageInput.from_message(Message(made.skeleton, tuple(map(cut.cut, whole))))  # its graph begins anew
        sequence_number = self.first.user.resume(batch, microbatch, after.output, after.trees)
        if torch.is_grad_enabled():
            self._under_way[microbatch].append((inputs, cut, sequence_number, lengths))

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        """Run the loss's backward first, unless that of a later pass has."""
        passes = self._under_way[microbatch]
        inputs, cut, sequence_number, sequence_lengths = passes[-1] if passes else (None, None, 0, ())
        if batch.has_loss:
            nodes = {node for _, cut_of_pass, *_ in passes for node in cut_of_pass.nodes}
            loss = self.first.user.begin_loss(batch, microbatch, nodes, sequence_number)
            if loss is not None:
                self._loss_backward(batch, *loss)
        if inputs is None or cut is None:
            return None  # no pass of the step has gradients
        passes.pop()
        self.hooks.before_backward(*sequence_lengths)
        cut.backward(always=not isinstance(self.boundary, NoReshard))  # the ranks of a cube run the same backward
        return gradient_message(inputs.gradients)

    def _loss_backward(self, batch: Batch, microbatch: int, outputs: set[Node], sequence_number: int) -> None:
        """Run the backward of the weighted loss up to the stack, and drop the graph of the step's result.

        `outputs` are the nodes with which the graph of the code after a pass begins. Nodes older than autograd's
        `sequence_number` belong to the code before the last pass.
        """
        if batch.loss_weights[microbatch]:  # with weight 0 not even a NaN counts: the mean over no tokens is one
            loss = loss_of(batch.results[microbatch])
            batch.on_loss(microbatch, loss)
            nodes, leaves = graph_boundary.reachable([loss], stop=outputs)
            uses_early_nodes = any(node._sequence_nr() < sequence_number for node in nodes)  # a skip past the stack
            weighted = batch.weighted(microbatch, loss)
            tied: frozenset[Tensor] = frozenset()
            if self.first.has_backward(microbatch):  # not where no pass of the step has gradients
                parameters = frozenset(leaf for leaf in leaves if isinstance(leaf, nn.Parameter))
                if parameters not in self._known_tied:  # the first stage's graph is large
                    self._known_tied[parameters] = parameters & self.first.used_parameters(microbatch)
                tied = self._known_tied[parameters]
            with graph_boundary.without_autocast():
                self.first.tied.loss_backward(
                    microbatch, tied, lambda: weighted.backward(retain_graph=uses_early_nodes)
                )
        batch.results[microbatch] = detach_tree(batch.results[microbatch])


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
            batch.on_loss(microbatch, loss)
            with graph_boundary.without_autocast():
                torch.autograd.backward(batch.weighted(microbatch, loss))  # Lightning calls the loss's method
        batch.results[microbatch] = detach_tree(batch.results[microbatch])


def find_loss(result: Any) -> Tensor | None:
    """The loss in a training_step's result, if there is one."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    return loss if isinstance(loss, Tensor) else None


def loss_of(result: Any) -> Tensor:
    """The loss in a training_step's result.

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
