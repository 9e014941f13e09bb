"""The user's step run once, on the whole batch: only the stack is cut into micro-batches.

    step     embedding of 8 samples |suspended ...                                     | loss of 8 samples
    stack                            0 1 | 2 3 | 4 5 | 6 7   cut, through all stages, joined
    backward                         cut again, through all stages, joined   <-  the loss's, once
             <-  the embedding's, once

So all code outside the stack computes what one process computes. A tensor is cut along the dimension that grows with
the samples. Which one that is shows a dry run of the code before the stack, on one micro-batch: of a table with as many
rows as there are samples, nothing changes.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel import graph_boundary, pytree
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture.carriers import CarrierOfDryRun
from lightning_hanayo.pipeline_parallel.capture.dry_step import kept_buffers
from lightning_hanayo.pipeline_parallel.capture.stage_input import StageInput
from lightning_hanayo.pipeline_parallel.capture.user_step import UserStep
from lightning_hanayo.pipeline_parallel.p2p import Message
from lightning_hanayo.pipeline_parallel.rng import generator_states, set_generators
from lightning_hanayo.versions import version_of

Dims = tuple[int | None, ...]
"""of each tensor of a message: the dimension that grows with the samples; None: all micro-batches get the whole"""
NO_ENTRIES = "without an entry for each sample"
"""in the warning of a step that gets means of micro-batches, by which a check knows it"""
Scaled = frozenset[tuple[int, ...]]
"""the sizes in a message that grow with the samples: call, node, and number in a `torch.Size`"""
_OF_SIZES = frozenset(("view", "reshape", "expand", "unflatten", "broadcast_to", "new_zeros", "new_ones", "new_empty"))
"""functions between blocks whose whole numbers are sizes or dimensions"""


class CutTensor:
    """A tensor outside the stack, and the part of it that each micro-batch's blocks get, cut off its graph.

    `dim` grows with the samples, of which the micro-batches have these numbers; None: the parts are the whole.
    """

    def __init__(self, whole: Tensor, dim: int | None, samples: Sequence[int]) -> None:
        self.whole = whole
        self.has_gradient = whole.requires_grad and torch.is_grad_enabled()
        self.dim = dim
        self._version = version_of(whole)
        parts: Sequence[Tensor] = [whole] * len(samples)
        if dim is not None:
            per_sample = whole.shape[dim] / sum(samples)
            parts = whole.split([round(n * per_sample) for n in samples], dim)
        # `.data`: each part counts its changes in place for itself
        self.parts = [part.data.requires_grad_(self.has_gradient) for part in parts]

    def check(self) -> None:
        """Check before the step's backward goes on that the step hasn't changed what blocks have kept.

        Raises:
            UnsupportedError: it has.
        """
        if version_of(self.whole) != self._version:
            raise UnsupportedError(
                f"the step changes a tensor of the shape {tuple(self.whole.shape)} in place that it has passed to the "
                f"blocks, whose backward may need it as it was. Change a copy of it."
            )

    def check_shared(self) -> None:
        """Check once the blocks have run forward that none has changed what all micro-batches get.

        Raises:
            UnsupportedError: one has.
        """
        if self.dim is None and len(self.parts) > 1 and any(map(version_of, self.parts)):
            raise UnsupportedError(
                f"a block changes an argument of the shape {tuple(self.whole.shape)} in place that has no dimension of "
                f"the samples: once for each micro-batch. Change a copy of it, or set step='microbatch'."
            )

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of the whole, once all parts have theirs."""
        made = [part.grad for part in self.parts]
        if all(one is None for one in made):
            return None
        gradients = [torch.zeros_like(part) if one is None else one for part, one in zip(self.parts, made, strict=True)]
        return torch.stack(gradients).sum(0) if self.dim is None else torch.cat(gradients, self.dim)


@dataclass
class Pass:
    """One pass of the step through the stack. `samples`: of each micro-batch; `rows`: those of this rank's blocks."""

    samples: Sequence[int]
    rows: Sequence[int]
    calls: list[tuple[Message, Dims, Scaled]] = field(default_factory=list)
    """the whole calls of the first block, and those of the others, with code between them"""
    tensors: dict[int, CutTensor] = field(default_factory=dict)
    """by id: one that several blocks get is cut once"""
    outputs: dict[int, Any] = field(default_factory=dict)
    """by micro-batch, until all are there: the stack's output, and what blocks have stored"""
    backwards_left: int = 0

    def cut(self, number: int, microbatch: int) -> Message:
        """The part of calls that a micro-batch's blocks get."""
        whole, dims, scaled = self.calls[number]
        parts = []
        for tensor, dim in zip(whole.tensors, dims, strict=True):
            if id(tensor) not in self.tensors:
                self.tensors[id(tensor)] = CutTensor(tensor, dim, self.samples)
            parts.append(self.tensors[id(tensor)].parts[microbatch])
        skeleton = whole.skeleton
        if scaled:
            skeleton = _with_scaled(skeleton, scaled, self.rows[microbatch], sum(self.samples))
        return Message(skeleton, tuple(parts))

    @property
    def differentiable(self) -> list[CutTensor]:
        """The tensors that get a gradient."""
        return [one for one in self.tensors.values() if one.has_gradient]


@dataclass(eq=False, repr=False)
class WholeStep(UserStep):
    """Gives the stages the calls of each micro-batch's blocks, and takes the stack's outputs, of one step.

    It is suspended at the first block, too.
    """

    _: KW_ONLY
    outside: Sequence[nn.Module] = ()
    """the modules outside the stack, whose buffers a dry run leaves as they are"""
    own_rows: Callable[[int], int] = int
    """of so many samples those on which this rank's blocks work"""
    nodes: set[Node] = field(default_factory=set, init=False)
    """with which the graph begins of the code after the passes of this batch"""
    sequence_number: int = field(default=0, init=False)
    """autograd's, at the last pass"""
    _passes: list[Pass] = field(default_factory=list, init=False)
    _dims: dict[Any, dict[Any, int | None]] = field(default_factory=dict, init=False)
    """by where a tensor is in calls, and by its size for each sample along the dimension that grows, or its shape"""
    _scaled: dict[Any, Scaled] = field(default_factory=dict, init=False)
    """by the structure of calls, and the number of samples"""
    _output_dims: dict[Any, int | None] = field(default_factory=dict, init=False)
    """by what distinguishes tensors that come out of the stack"""
    _guessed: set[Any] = field(default_factory=set, init=False)
    """those of them of which micro-batches of one size alone were seen"""
    _has_warned: bool = field(default=False, init=False)
    _ended_loss: bool = field(default=False, init=False)

    @property
    def knows_outputs(self) -> bool:
        """Whether micro-batches of different sizes have shown along which dimensions outputs are joined."""
        return bool(self._output_dims) and not self._guessed

    @property
    def arguments(self) -> list[Tensor]:
        """What the blocks get in the batch, with its graph."""
        return [one.whole for each in self._passes for one in each.differentiable]

    def backwards_before_stack(self, loss: Any) -> int:
        """How many backwards of this batch reach code before the stack: one for each pass, and one past the stack."""
        nodes, _ = graph_boundary.reachable([loss] if isinstance(loss, Tensor) else [], stop=self.nodes)
        passes_by = any(node._sequence_nr() < self.sequence_number for node in nodes)
        return sum(bool(one.differentiable) for one in self._passes) + passes_by

    @property
    @override
    def waiting(self) -> list[int]:
        return list(range(len(self._passes[-1].samples))) if super().waiting else []

    @override
    def begin_batch(self) -> None:
        self._passes.clear()
        self.nodes.clear()
        self._ended_loss = False
        super().begin_batch()

    @override
    def begin_pass(self, batch: Batch, microbatch: int) -> Message:
        """The call of the first block, for a micro-batch. The first one to ask starts the step, or its next pass.

        Raises:
            UnsupportedError: it isn't known how many samples micro-batches have, or an argument can't be cut.
        """
        if batch.pass_number == len(self._passes):
            if not batch.num_samples:
                raise UnsupportedError(
                    "step='batch' cuts the arguments of blocks by samples, which can't be counted in what split_batch "
                    "returned. Let it return pieces whose tensors have a row for each sample, or leave it out."
                )
            call = super().begin_pass(batch, 0)
            rows = list(map(self.own_rows, batch.num_samples))
            self._passes.append(Pass(batch.num_samples, rows, backwards_left=len(batch.num_samples)))
            self._passes[-1].calls.append((call, *self._dims_of(batch, call)))
        return self._passes[batch.pass_number].cut(0, microbatch)

    def dims_of_parts(self, batch: Batch, parts: Sequence[Tensor]) -> Sequence[int | None] | None:
        """Along which dimensions parts of calls were cut; None where there is one micro-batch, so that none was."""
        current = self._passes[batch.pass_number]
        if len(current.samples) == 1:
            return None
        dims = {id(part): one.dim for one in current.tensors.values() for part in one.parts}
        return [dims.get(id(part)) for part in parts]

    @override
    def run_to_last_block(self, batch: Batch, microbatch: int, after: StageInput) -> Message:
        """The calls of the other blocks, for a micro-batch whose first block has run."""
        current = self._passes[batch.pass_number]
        if len(current.calls) == 1:
            calls = super().run_to_last_block(batch, 0, after)  # it sees the structure of the block's output alone
            current.calls.append((calls, *self._dims_of(batch, calls, after)))
        return current.cut(1, microbatch)

    @override
    def resume(self, batch: Batch, microbatch: int, output: Any, trees: Sequence[Any]) -> int:
        """Take a micro-batch's output of the stack. The last one resumes the step, with all of them joined."""
        current = self._passes[batch.pass_number]
        current.outputs[microbatch] = output, tuple(trees)
        if len(current.outputs) == len(current.samples):
            output, trees = self._joined(current)
            current.calls.clear()
            for one in current.tensors.values():
                one.check_shared()
            if not torch.is_grad_enabled():
                current.tensors.clear()
            self.sequence_number = super().resume(batch, 0, output, trees)
        return self.sequence_number

    @override
    def begin_loss(
        self, batch: Batch, microbatch: int, nodes: set[Node], sequence_number: int
    ) -> tuple[int, set[Node], int] | None:
        """Of the one loss, before the first backward of all micro-batches."""
        begun = super().begin_loss(batch, 0, self.nodes, self.sequence_number)
        is_first, self._ended_loss = not self._ended_loss, True
        return begun if is_first else None

    @override
    def end_backward(self, batch: Batch) -> None:
        """The last one goes on, before the stack."""
        current = self._passes[batch.pass_number]
        current.backwards_left -= 1
        if current.backwards_left:
            return
        for one in current.tensors.values():
            one.check()
        is_earlier = any(one.differentiable for one in self._passes[: batch.pass_number])
        cut = current.differentiable
        graph_boundary.run_backward([one.whole for one in cut], [one.gradient for one in cut], retain_graph=is_earlier)
        current.tensors.clear()
        self.nodes.clear()

    @override
    def start_dry_run(self, *_: Any) -> NoReturn:
        """Called where the arguments of blocks differ between the ranks of a cube, which all run the whole step."""
        raise UnsupportedError(
            "the step gives the blocks other arguments on other ranks of a cube, which all run it on the whole batch: "
            "does it draw random numbers that aren't torch's, or depend on its rank?"
        )

    finish_dry_run = start_dry_run  # type: ignore[assignment]

    @override
    def close(self) -> None:
        self._passes.clear()
        super().close()

    def _dims_of(self, batch: Batch, calls: Message, after: StageInput | None = None) -> tuple[Dims, Scaled]:
        """Along which dimensions the tensors of calls are cut, and which sizes are those of a micro-batch.

        `after`: the first block, if these are the calls of the others.

        Raises:
            UnsupportedError: a tensor doesn't grow with the samples in one dimension alone.
        """
        samples, first = batch.num_samples, after is None
        if len(samples) == 1:
            return (None,) * len(calls.tensors), frozenset()
        total, named = sum(samples), list(tensors_of_calls(calls, first=first))
        dims, num_named = self._known_dims(batch, named), len({id(tensor) for _, tensor in named})
        key = calls.skeleton, total
        if not any(_is_of_sizes(call) for call in calls.skeleton[1]):
            self._scaled[key] = frozenset()
        for microbatch in range(len(samples)):  # a mask comes only with samples that need one
            if len(dims) == num_named and key in self._scaled:
                break
            part = self._dry_run(batch, microbatch, StageInput.from_message(calls).trees, after)
            parts = dict(tensors_of_calls(part, first=first))
            self._scaled[key] = _scaled_numbers(calls, part, samples[microbatch] / total)
            for path, tensor in named:
                if path in parts:
                    dim = grown_dim(tensor, parts[path], samples[microbatch] / total)
                    size = tensor.shape if dim is None else tensor.shape[dim] / total
                    self._dims.setdefault((path, tensor.ndim), {})[size] = dim
            dims = self._known_dims(batch, named)
        if len(dims) == num_named:  # others are of the first block's output, if there is no other block
            return tuple(dims.get(id(tensor)) for tensor in calls.tensors), self._scaled[key]
        missing = next(tuple(tensor.shape) for _, tensor in named if id(tensor) not in dims)
        raise UnsupportedError(
            f"an argument of the blocks, of the shape {missing}, is there for the whole batch, and for none of its "
            f"micro-batches alone: how to cut it isn't known. Set step='microbatch'."
        )

    def _known_dims(self, batch: Batch, named: Sequence[tuple[Any, Tensor]]) -> dict[int, int | None]:
        """The known dimensions along which tensors are cut, by their ids."""
        total = sum(batch.num_samples)
        found: dict[int, int | None] = {}
        for path, tensor in named:
            known = self._dims.get((path, tensor.ndim), {})
            cut = [dim for size, dim in known.items() if dim is not None and tensor.shape[dim] == size * total]
            whole = [size for size, dim in known.items() if dim is None]
            if cut:
                found[id(tensor)] = cut[0]
            elif whole and (tensor.shape in whole or batch.pass_number or all(n % total for n in tensor.shape)):
                found[id(tensor)] = None  # the length of sequences may be another one
        return found

    def _dry_run(self, batch: Batch, microbatch: int, trees: Sequence[Any], after: StageInput | None) -> Message:
        """The calls that the step makes on one micro-batch alone. Nothing else remains of it."""
        if batch.pass_number:
            raise UnsupportedError(
                f"a later pass of the step through {self.name} gives its blocks other arguments than the first one: "
                f"how to cut them isn't known. Pass the same arguments each time, or set step='microbatch'."
            )
        device = next((one.device for one in self.blocks[0].parameters()), torch.device("cpu"))
        states = generator_states(device)
        streams = self.streams.save()
        try:
            with kept_buffers(self.outside):
                calls = super().start_dry_run(batch, microbatch, tuple(map(CarrierOfDryRun, self.carriers, trees)))
                if after is not None:
                    calls = super().finish_dry_run(batch, microbatch, after.output)
                else:
                    self._dry_runs.pop(microbatch).abandon()
                    self.undo()  # a `finally` has run
        except Exception as error:  # of the user's code
            error.add_note(
                "This was a dry run on one micro-batch, which shows how to cut what the blocks get in a step on the "
                "whole batch. A step that can't run on fewer samples needs num_microbatches=1."
            )
            raise
        set_generators(states, device)
        self.streams.restore(streams)
        return calls

    def _joined(self, current: Pass) -> tuple[Any, Sequence[Any]]:
        """The stack's output for the whole batch, and what blocks have stored.

        Raises:
            UnsupportedError: they differ in structure between micro-batches, or grow with samples in an unknown way.
        """
        made = [current.outputs[m] for m in range(len(current.samples))]
        current.outputs.clear()
        if len(made) == 1:
            self._note_nodes(made[0])
            return made[0]  # type: ignore[no-any-return]
        outputs, trees = zip(*made, strict=True)
        by_carrier = zip(self.carriers, zip(*trees, strict=True), strict=True)
        of_batch = [carrier.of_batch(column) for carrier, column in by_carrier]
        made = [(output, tuple(one[m] for one in of_batch)) for m, output in enumerate(outputs)]
        flattened = []
        for one in made:
            flattener = pytree.Flattener()
            skeleton = flattener.flatten(one, "what the stack returns")
            flattened.append((skeleton, flattener.tensors))
        paths = [dict(_places(skeleton)) for skeleton, _ in flattened]
        if any(other != paths[0] for other in paths[1:]):
            raise UnsupportedError(
                "what the blocks return or store for some micro-batches has another structure than for others: there "
                "is none of the whole batch. Set step='microbatch'."
            )
        names = {index: path for path, index in paths[0].items()}
        columns = zip(*[tensors for _, tensors in flattened], strict=True)
        joined = [self._join(names[i], column, current.samples) for i, column in enumerate(columns)]
        self._note_nodes(joined)
        if len({skeleton for skeleton, _ in flattened}) > 1:
            self._warn("plain values", "last ones")
        return pytree.unflatten(flattened[-1][0], joined)  # type: ignore[no-any-return]

    def _warn(self, what: str, gets: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"blocks return or store {what} for each micro-batch, {NO_ENTRIES}. The step gets the {gets} of a "
                f"batch. The training depends on num_microbatches, unless it is a mean over samples.",
                stacklevel=2,
            )

    def _note_nodes(self, joined: Any) -> None:
        tensors = (one for one in tree_leaves(joined) if isinstance(one, Tensor))
        self.nodes.update(one.grad_fn for one in tensors if one.grad_fn is not None)

    def _join(self, path: Any, parts: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
        """One tensor of the whole batch, of those of its micro-batches."""
        first, key = parts[0], (path, parts[0].ndim)
        dim = self._output_dims[key] = self._join_dim(key, parts, samples)
        if dim is not None:
            return torch.cat(list(parts), dim)
        is_number = not first.is_floating_point()
        is_same = (is_number or first.device.type == "cpu") and all(torch.equal(first, part) for part in parts[1:])
        if is_same and not any(part.requires_grad for part in parts):
            return first  # the step has set it, say
        if not is_same:
            self._warn(f"a tensor of the shape {tuple(first.shape)}", "last one" if is_number else "mean")
        if is_number:
            return parts[-1]
        weighted = [part * (n / sum(samples)) for part, n in zip(parts, samples, strict=True)]
        return torch.stack(weighted).sum(0)

    def _join_dim(self, key: Any, parts: Sequence[Tensor], samples: Sequence[int]) -> int | None:
        """The dimension that grows with the samples.

        If all micro-batches have as many, and no others were seen before: that of the first block's first tensor that
        is cut, if as large.
        """
        if len(set(samples)) > 1:
            shapes = [tuple(part.shape) for part in parts]
            grown = {dim for shape in shapes for dim, size in enumerate(shape) if size != shapes[0][dim]}
            dim = grown.pop() if grown else None
            per_sample = {} if dim is None else {shape[dim] / n for shape, n in zip(shapes, samples, strict=True)}
            if grown or len(per_sample) > 1 or self._output_dims.get(key, dim) != dim:
                raise UnsupportedError(
                    f"the blocks return or store tensors of the shapes {', '.join(map(str, dict.fromkeys(shapes)))} "
                    f"for {list(samples)} samples: how to join them isn't known. Set step='microbatch'."
                )
            self._guessed.discard(key)
            return dim
        if key in self._output_dims:
            return self._output_dims[key]
        self._guessed.add(key)
        ((calls, dims, _), *_), shape = self._passes[-1].calls, parts[0].shape
        first = next(((one, dim) for one, dim in zip(calls.tensors, dims, strict=True) if dim is not None), None)
        if first is None or first[1] >= len(shape):
            return None
        part = self._passes[-1].tensors[id(first[0])].parts[0]
        return first[1] if shape[first[1]] == part.shape[first[1]] else None


def grown_dim(whole: Tensor, part: Tensor, share: float) -> int | None:
    """The dimension of `whole` that grows with the samples, of which `part` has this share; None if nothing grows.

    Raises:
        UnsupportedError: more than one dimension grows, or not in proportion.
    """
    if whole.shape == part.shape:
        return None
    same = whole.ndim == part.ndim
    grown = [dim for dim in range(whole.ndim) if same and whole.shape[dim] != part.shape[dim]]
    if len(grown) != 1 or abs(whole.shape[grown[0]] * share - part.shape[grown[0]]) > 1e-6:
        raise UnsupportedError(
            f"an argument of the blocks is {list(whole.shape)} for the batch and {list(part.shape)} for {share:.0%} of "
            f"it: it has no dimension along which it can be cut into micro-batches. Pad it, or set step='microbatch'."
        )
    return grown[0]


def _is_of_sizes(call: pytree.Skeleton) -> bool:
    return len(call) > 3 and call[3][2].rpartition(".")[2] in _OF_SIZES


def _scaled_numbers(whole: Message, part: Message, share: float) -> Scaled:
    """The sizes in functions between blocks that grow with the samples.

    Raises:
        UnsupportedError: blocks or other functions get the number of samples, which is another one for them.
    """
    of_part, found = dict(_numbers(part)), set()
    _, distinct, call_of_block, *_ = whole.skeleton
    names, names_of_part = _names(whole), _names(part)
    if any(names) and names != names_of_part:
        raise UnsupportedError(
            f"between the blocks the step calls other functions with the whole batch than with {share:.0%} of its "
            f"samples. Set step='microbatch'."
        )
    for path, number in _numbers(whole):
        other = of_part.get(path, number)
        if other != number and abs(number * share - other) < 1e-6:
            call = call_of_block[path[0]] if path[0] < len(call_of_block) else -1
            if call < 0 or not _is_of_sizes(distinct[call]):
                raise UnsupportedError(
                    f"the blocks get the number {number} with the whole batch, and {other} with {share:.0%} of its "
                    f"samples, but they run on micro-batches. Let them read it off their arguments: x.shape[0]."
                )
            found.add((call, *path[1:]))
    return frozenset(found)


def _names(calls: Message) -> list[str | None]:
    """Of the functions between blocks; None: the call of a block."""
    _, distinct, call_of_block, *_ = calls.skeleton
    return [distinct[call][3][2] if len(distinct[call]) > 3 else None for call in call_of_block]


@lru_cache(maxsize=256)
def _with_scaled(skeleton: pytree.Skeleton, scaled: Scaled, samples: int, total: int) -> pytree.Skeleton:
    """The skeleton of a message with these sizes for so many of all samples."""

    def change(call: int, number: int, node: pytree.Skeleton) -> pytree.Skeleton:
        if node[0] == "size":
            sizes = (n * samples // total if (call, number, i) in scaled else n for i, n in enumerate(node[1:]))
            return ("size", *sizes)
        is_scaled = node[0] == "plain" and (call, number) in scaled
        return ("plain", "int", node[2] * samples // total) if is_scaled else node

    output, calls, *others = skeleton
    return output, tuple(pytree.map_nodes(call, partial(change, i)) for i, call in enumerate(calls)), *others


def _numbers(calls: Message) -> Iterator[tuple[Any, float]]:
    """The numbers in calls, by where they are."""
    _, distinct, call_of_block, *_, carried = calls.skeleton
    for number, root in enumerate((*(distinct[call] for call in call_of_block), carried)):
        for place, node in enumerate(pytree.nodes(root)):
            if node[0] == "plain" and type(node[2]) in (int, float):
                yield (number, place), node[2]
            elif node[0] == "size":
                yield from (((number, place, i), size) for i, size in enumerate(node[1:]))
            elif node[0] == "tensor" and not (one := calls.tensors[node[1]]).ndim and one.device.type == "cpu":
                yield (number, place), one.item()


def tensors_of_calls(calls: Message, *, first: bool) -> Iterator[tuple[Any, Tensor]]:
    """The tensors of the first block's call, or of the others', by block and argument, and those carried."""
    _, distinct, call_of_block, *_, carried = calls.skeleton
    roots = [*(distinct[call] for call in call_of_block), carried]
    for number, root in enumerate(roots, -len(roots)):
        for path, index in _places(root, (first, number)):
            yield path, calls.tensors[index]


def _places(skeleton: pytree.Skeleton, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, int]]:
    """Where in a tree each tensor is, by the keys on the way to it, and its index."""
    kind, *parts = skeleton
    if kind == "tensor":
        yield path, parts[0]
    elif kind == "dict":
        for key, value in parts:
            yield from _places(value, (*path, key))
    elif kind in ("tuple", "list", "object", "shared"):
        for number, part in enumerate(parts[kind in ("object", "shared") :]):
            yield from _places(part, (*path, number))
