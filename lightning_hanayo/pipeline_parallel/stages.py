"""The stage: one piece of the stack on one pipeline rank, with its forward and backward of a micro-batch.

FirstStage    user code up to the stack, and the first blocks        runs in the step's thread, which it suspends
MiddleStage   blocks
LastStage     blocks (none, if the schedule has a loss stage), and user code after the stack, up to the loss
SingleStage   the whole step, on one pipeline rank

With tensor parallelism several ranks run a stage together. Outside the stack each has its own samples, with all
features; inside it has shards. a `StageContext` is called around it; other stages have `NoHooks`.

The first and the last stage where no block runs in the user's step: with tensor parallelism, where the ranks of a
cube run each stage together, and where the step runs once on a whole batch.

    user code  |  graph cut  |  reshard  |  blocks  ...  blocks  |  reshard  |  graph cut  |  user code
    a thread                      the main thread                                             the thread again

All collectives run in the main thread, in the same order on all ranks. So the step is suspended at its first block too,
whose calls are converted to the layout inside the stack. A graph cut divides autograd's graph in two. So inside, all
ranks run the same backward, even a rank whose own samples do not count in the loss.
"""

import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel import graph_boundary
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.batches.microbatches import with_values
from lightning_hanayo.pipeline_parallel.capture.carriers import NO_CARRIERS, Carriers, merged
from lightning_hanayo.pipeline_parallel.capture.stage_input import StageInput, carried_of, is_block
from lightning_hanayo.pipeline_parallel.capture.user_step import NONE_SKIPPED, UserStep, missing_values_error
from lightning_hanayo.pipeline_parallel.capture.whole_step import WholeStep
from lightning_hanayo.pipeline_parallel.grad_sync import TiedGradients
from lightning_hanayo.pipeline_parallel.graph_boundary import DetachedInputs, GraphCut
from lightning_hanayo.pipeline_parallel.p2p import Message, gradient_message, unpack_gradients
from lightning_hanayo.pipeline_parallel.pytree import Flattener, tensor_indices, unflatten
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
        own = carried_of(calls)
        if any(other != own for other in self.boundary.all_gather_object(own)):
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

    def run_first_block(self, boundary: "MicrobatchReshard", call: Message, num_samples: int) -> Any:
        """Run the first block in a dry run, over another boundary, and return its output outside.

        Called by all ranks of the cube, which have the same samples.
        """
        boundary.begin([boundary.shares_of(num_samples)])
        inside = boundary.shard_arguments(0, call.tensors, self.arguments(call), call.skeleton)
        assert inside is not None
        lengths = boundary.sequence_lengths(0)
        self.hooks.before_forward(*lengths)
        given = StageInput.from_message(Message(call.skeleton, tuple(inside)))._replace(sequence_lengths=lengths)
        flattener = Flattener()
        output = given.run(self.blocks[:1], is_last=self.user.num_blocks == 1).output
        skeleton = flattener.flatten(output, "the output of a block")
        return unflatten(skeleton, boundary.unshard_outputs(0, flattener.tensors))
