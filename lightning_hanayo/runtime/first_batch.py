"""Proves by numbers, in the first training batch, that micro-batches add up to the batch that they were cut from.

One block of each kind runs again on what micro-batch 0 gave it, and the step's own backwards are repeated:

    what changes                   what must come of it             otherwise
    the samples of one half        the other half's outputs stay    a warning: samples depend on each other
    no gradient comes in           none goes out                    the code adds a gradient of its own, see below
    twice the gradient comes in    twice as much goes out           right if each sample is treated alone, else an error
    only one half's gradient       both halves add up               an error

An `autograd.Function` that adds an auxiliary loss in its backward adds a gradient of its own: as much for each
micro-batch, whatever its weight. What that belongs to is known from a run on twice as many samples:

    as much as before    a mean over samples    micro-batches' gradients are averaged, at the end of the batch
    twice as much        a sum over samples     right as it is
    neither              samples interact       averaged, with a warning
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_hanayo.errors import UnsupportedError, listed
from lightning_hanayo.runtime.autograd import graph_boundary
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.capture import forward_patch
from lightning_hanayo.runtime.capture.carried import NO_CARRIERS, Carriers
from lightning_hanayo.runtime.capture.holder import Scanner
from lightning_hanayo.runtime.capture.module_state import ModuleState
from lightning_hanayo.runtime.generators import generator_states, set_generators

Kind = Literal["mean", "coupled", "sum", "samplewise", "batchwise", "unknown"]
"""Why gradients aren't proportional to those that come in. Either there is a gradient of the code's own: of a mean over
samples, of coupled samples, of a sum, or of what isn't known. Or each sample is treated alone, or all together."""
_OWN = frozenset(("mean", "coupled", "sum", "unknown"))
Gradients = list[Tensor]
Backward = Callable[[float, int | None], Gradients]
"""runs with so many times the same gradient: of one half of the samples, 0 or 1, or of all"""

_EXACT, _ROUGH = 1e-3, 5e-2
"""relative errors of gradients: of the same sums, or computed in more than 16 bits; and of others"""
_LARGE = 8.0
"""times the usual numbers, with which samples that depend on each other after training do so in a new model, too"""
STEP = "the step's code outside the stack"


@dataclass(frozen=True)
class Findings:
    """What one rank has found, by the names of blocks."""

    gradients: Mapping[str, Kind]
    dependent: Sequence[str]
    """where samples depend on each other"""


@dataclass(eq=False, repr=False, kw_only=True)
class FirstBatch:
    """The proof, on one rank of a pipeline. All ranks call the same methods.

    Args:
        blocks: those that this rank runs, by qualified name.
        device: this rank's.
        num_microbatches: of a batch.
        average: called where gradients are averaged from this batch on. Returns what they are multiplied by at the end
            of a batch, and losses no more.
        is_single: whether the step runs in one piece.
        is_cube: whether several ranks run each block.
        carriers: of what blocks store, record and log.
        all_gather: gathers an object from the ranks of this rank's cube.
        share: gathers the findings of all ranks of the world.
        warns: whether this rank gives the warnings.
    """

    blocks: Mapping[str, nn.Module]
    device: torch.device
    num_microbatches: int
    average: Callable[[], float]
    is_single: bool = False
    is_cube: bool = False
    carriers: Carriers = NO_CARRIERS
    all_gather: Callable[[Any], list[Any]] = lambda value: [value]
    share: Callable[[Findings], list[Findings]] = lambda own: [own]
    warns: bool = True
    _calls: dict[nn.Module, Any] = field(default_factory=dict, init=False)
    _before: Sequence[Tensor] = field(default=(), init=False)
    """what the code before the stack has made for the first block"""
    _samples: int = field(default=0, init=False)
    """of micro-batch 0 on this rank; 0 if they can't be told apart"""
    _found: Mapping[str, Kind] = field(default_factory=dict, init=False)
    """in the blocks of all ranks"""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """To be open while micro-batch 0 runs forward: one block of each kind keeps its arguments."""
        kinds: dict[Any, nn.Module] = {}
        for block in self.blocks.values():
            kinds.setdefault(_block_kind(block), block)
        with forward_patch.recording(kinds.values()) as self._calls:
            yield

    def examine(self, batch: Batch) -> Batch:
        """Run the blocks again. Called between the forward of micro-batch 0 and the first backward of the batch.

        Returns the batch, with weights that are right.

        Raises:
            UnsupportedError: gradients wouldn't be those of the batch.
        """
        on_ranks = self.all_gather(batch.samples)  # the ranks of a cube run as often as each other
        self._samples = batch.samples if min(on_ranks) > 1 or len(set(on_ranks)) == 1 else 0
        calls, self._calls = self._calls, {}
        if batch.step is not None:
            batch.on_user_code(None)
            if calls and not self.is_single:
                self._before = [t for t in tree_leaves(next(iter(calls.values()))) if _has_graph(t)]
        names = {block: name for name, block in self.blocks.items()}
        gradients: dict[str, Kind] = {}
        dependent: list[str] = []
        for block in list(calls):
            with self.carriers.quiet(block), _undone(block, self.device):
                run = _BlockRun(block, calls.pop(block), self._samples, self.device, is_cube=self.is_cube)
                name = f"{type(block).__name__} ({names[block]}"
                with suppress(Exception):  # where a block can't run again, nothing is known
                    if run.is_dependent():
                        dependent.append(f"{name})")
                    if (kind := run.kind()) is not None:
                        gradients[f"{name}{run.functions})"] = kind
        return self._conclude(batch, self.share(Findings(gradients, dependent)))

    def examine_step(self, outputs: Sequence[Tensor]) -> None:
        """Repeat a backward of the step's code for micro-batch 0, which has run, and whose graph is still there.

        `outputs` are what it begins with: the loss, or what the first block gets; () if that is known.

        Raises:
            UnsupportedError: gradients aren't those of the batch.
        """
        if not outputs:
            outputs, self._before = self._before, ()
        nodes, leaves = graph_boundary.reachable(outputs)
        ordered = list(leaves)
        is_loss = all(one.numel() == 1 for one in outputs)
        shape = () if is_loss else outputs[0].shape
        # Of a single sample the entries of another dimension are taken apart, which is stricter.
        dims = [dim for dim, n in enumerate(shape[:-1]) if (n == self._samples if self._samples > 1 else n > 1)][:1]
        count = shape[dims[0]] if dims else self._samples

        def backward(factor: float, half: int | None) -> Gradients:
            with _masking(nodes, self._samples, half if is_loss else None):
                seeds = [_seed(one, factor, dims, count, half) for one in outputs]
                return _gradients(outputs, ordered, seeds, is_cube=self.is_cube, retain_graph=True)

        try:
            kind = _kind(
                backward,
                lambda _: "unknown",
                has_halves=is_loss or bool(dims),
                is_cube=self.is_cube,
                is_lazy=is_loss,
            )
        except Exception:  # it can't run again
            return
        explained = self.is_single and kind == "unknown" and not _OWN.isdisjoint(self._found.values())
        if kind is not None and not explained:
            self._check({**self._found, STEP + _functions(nodes): kind})

    def _conclude(self, batch: Batch, findings: Sequence[Findings]) -> Batch:
        self._found = {name: kind for one in findings for name, kind in one.gradients.items()}
        self._check(self._found)
        averaged = [name for name, kind in self._found.items() if kind in ("mean", "coupled")]
        if averaged:
            late = self.average()
            batch = replace(batch, loss_weights=[weight / late for weight in batch.loss_weights])
        count = self.num_microbatches
        coupled = [name for name in averaged if self._found[name] == "coupled"]
        if self.warns and coupled and count > 1:
            warnings.warn(
                f"{listed(coupled)}: an auxiliary loss that the backward adds to the gradients is no mean over "
                f"samples, as most that balance loads aren't. It is averaged over the {count} micro-batches of a "
                f"batch: the training depends on num_microbatches, as with accumulate_grad_batches.",
                stacklevel=2,
            )
        dependent = dict.fromkeys(name for one in findings for name in one.dependent)
        if self.warns and dependent and count > 1:
            warnings.warn(
                f"{listed(dependent)}: the outputs of some samples of a micro-batch change with other samples of it. "
                f"Each of the {count} micro-batches of a batch has its own: the training depends on num_microbatches, "
                f"as with accumulate_grad_batches.",
                stacklevel=2,
            )
        return batch

    def _check(self, found: Mapping[str, Kind]) -> None:
        """Check that one of two ways is right for all of them: weights in the loss, or gradients that are averaged.

        Raises:
            UnsupportedError: it isn't.
        """
        for name, kind in found.items():
            if kind == "batchwise":
                raise UnsupportedError(
                    f"{name}: the gradients aren't proportional to those that come in, nor those of each sample alone: "
                    f"an autograd.Function or a tensor hook computes with all of them, such as g / g.norm(). It would "
                    f"get those of a micro-batch. Do it on parameter.grad in on_before_optimizer_step, or for each "
                    f"sample alone, or set num_microbatches=1."
                )
            if kind == "unknown":
                raise UnsupportedError(
                    f"{name}: an autograd.Function or a tensor hook adds a gradient of its own to those that come in, "
                    f"such as that of an auxiliary loss. It would count once for each micro-batch. Add the auxiliary "
                    f"loss to the one that the step returns (a block may store it: self.aux = ...), or set "
                    f"num_microbatches=1{' and cube=1' * self.is_cube}."
                )
        ways = {"average": [n for n, k in found.items() if k in ("mean", "coupled")]}
        ways["weigh"] = [n for n, k in found.items() if k in ("sum", "samplewise")]
        if all(ways.values()):
            raise UnsupportedError(
                f"{ways['average'][0]} adds the gradient of a mean over samples to those that come in, and "
                f"{ways['weigh'][0]} that of a sum, or changes each sample's gradient by itself. No weights of "
                f"micro-batches are right for both. Add auxiliary losses to the one that the step returns, or set "
                f"num_microbatches=1."
            )


class _BlockRun:
    """Runs a block again on what it was called with, each time with the same random numbers."""

    def __init__(self, block: nn.Module, call: Any, samples: int, device: torch.device, *, is_cube: bool) -> None:
        self.functions = ""
        """the names of autograd functions in it"""
        self._block, self._device, self._is_cube, self._samples = block, device, is_cube, samples
        values, self._spec = tree_flatten(call)
        self._values = [value.detach() if isinstance(value, Tensor) else value for value in values]
        floats = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point() and v.ndim > 1]
        self._streams = [i for i in floats if values[i].requires_grad] or floats[:1]
        self._dims = _sample_dims(self._values[self._streams[0]], samples) if self._streams else []
        self._is_independent = False
        self._states = generator_states(device)

    def is_dependent(self) -> bool:
        """Whether outputs of one half of the samples change with the other half."""
        if self._samples == 1 and self._dims:
            self._add_sample()
        with torch.no_grad():
            large = [value * _LARGE if i in self._streams else value for i, value in enumerate(self._values)]
            runs = [(values, self._run(values)) for values in (self._values, large)]
            for dim in self._dims[:1] if self._is_cube else self._dims:
                stays = [self._stays(*run, dim, half) for run in runs for half in (0, 1)]  # all: ranks communicate
                if all(stays):
                    self._dims, self._is_independent = [dim], True
                    return False
        return bool(self._dims) and not any(isinstance(m, _BatchNorm) and m.training for m in self._block.modules())

    def kind(self) -> Kind | None:
        """Why its gradients aren't proportional to those that come in; None if they are, or if it isn't known."""
        of_half = self._backward(1.0, 0)[: len(self._streams)] if self._dims else []
        found = _kind(self._backward, self._kind_of_own, has_halves=bool(self._dims), is_cube=self._is_cube)
        if found is None and self._is_independent:
            others = [g.narrow(self._dims[0], *_rows(self._samples, 1)) for g in of_half if self._has_rows(g)]
            return "batchwise" if _size(others) > _ROUGH * _size(of_half) else None
        return found

    def _has_rows(self, tensor: Tensor, times: int = 1) -> bool:
        """Whether it has a row for each sample; `times` as many have run."""
        return bool(self._dims) and _has_rows(tensor, self._dims[0], times * self._samples)

    def _add_sample(self) -> None:
        """Let the block run on two samples; if it can't, it gets what isn't cut here."""
        joined = self._joined(self._changed(self._values, self._dims[0]))
        try:
            with torch.no_grad():
                self._run(joined)
            self._values, self._samples, self._dims = joined, 2, self._dims[:1]
        except Exception:
            self._dims = []

    def _stays(self, values: Sequence[Any], whole: Sequence[Tensor], dim: int, half: int) -> bool:
        """Whether the outputs of one half stay where the other half changes."""
        made = self._run(self._changed(values, dim, 1 - half))
        rows = _rows(self._samples, half)
        tolerance = max(1e-6, _rounding(whole, self._device) / 4)
        return all(
            _gap([a.narrow(dim, *rows).nan_to_num()], [b.narrow(dim, *rows).nan_to_num()]) <= tolerance
            for a, b in zip(whole, made, strict=True)
            if _has_rows(a, dim, self._samples)
        )

    def _kind_of_own(self, own: Gradients) -> Kind:
        """What a gradient of its own belongs to: runs on other samples, and on these and those, tell."""
        if self._is_cube or not self._dims:
            return "unknown"
        dim, others = self._dims[0], self._changed(self._values, self._dims[0])
        try:
            of_others = self._backward(0.0, values=others)
            of_both = self._backward(0.0, values=self._joined(others), times=2)
        except Exception:
            return "unknown"
        apart = [
            a + b if a.shape == both.shape else torch.cat([a, b], dim)
            for a, b, both in zip(own, of_others, of_both, strict=True)
        ]
        tolerance = _EXACT if _rounding(own, self._device) < 1e-5 else _ROUGH
        if _gap(apart, of_both) <= tolerance:
            return "sum"
        return "mean" if _gap(apart, of_both, of_both) <= tolerance else "coupled"

    def _backward(
        self, factor: float, half: int | None = None, values: Sequence[Any] | None = None, times: int = 1
    ) -> Gradients:
        """The gradients of the block's inputs and parameters, by a graph of their own."""
        inputs = list(self._values if values is None else values)
        leaves = []
        for i in self._streams:
            inputs[i] = inputs[i].detach().requires_grad_()
            leaves.append(inputs[i])
        made = [output for output in self._run(inputs) if output.requires_grad]
        outputs = [output for output in made if self._has_rows(output, times)] or made[:1]
        if not outputs:
            return []
        self.functions = _functions(graph_boundary.reachable(outputs)[0])
        leaves += [parameter for parameter in self._block.parameters() if parameter.requires_grad]
        seeds = [_seed(output, factor, self._dims, self._samples, half) for output in outputs]
        return _gradients(outputs, leaves, seeds, is_cube=self._is_cube)

    def _run(self, values: Sequence[Any]) -> list[Tensor]:
        """The tensors of numbers in what the block returns."""
        set_generators(self._states, self._device)
        copies = [value.clone() if isinstance(value, Tensor) else value for value in values]
        args, kwargs = tree_unflatten(copies, self._spec)
        made = tree_leaves(forward_patch.run_uncompiled(self._block, *args, **kwargs))
        return [one for one in made if isinstance(one, Tensor) and one.is_floating_point()]

    def _changed(self, values: Sequence[Any], dim: int, half: int | None = None) -> list[Any]:
        """These arguments with other samples in one half, or in both."""
        changed = list(values)
        for i in self._streams:
            if _has_rows(values[i], dim, self._samples):
                changed[i] = values[i].clone()
                rows = changed[i].narrow(dim, *_rows(self._samples, half))
                rows.copy_(rows.roll(1, -1) * 1.5)
        return changed

    def _joined(self, others: Sequence[Any]) -> list[Any]:
        """What it is called with, for these samples and the others."""
        return [
            torch.cat([one, other], self._dims[0]) if isinstance(one, Tensor) and self._has_rows(one) else one
            for one, other in zip(self._values, others, strict=True)
        ]


def _kind(
    backward: Backward,
    kind_of_own: Callable[[Gradients], Kind],
    *,
    has_halves: bool,
    is_cube: bool,
    is_lazy: bool = False,
) -> Kind | None:
    """Why the gradients aren't proportional to those that come in; None if they are, or if it isn't known.

    On a cube all ranks run as many backwards. If it is lazy, halves only count where doubling fails.
    """
    zero, once, twice = (backward(factor, None) for factor in (0.0, 1.0, 2.0))

    def adds_up() -> bool:
        return has_halves and _gap(once, backward(1.0, 0), backward(1.0, 1)) <= _ROUGH

    adds = None if is_lazy and not is_cube else adds_up()
    if not isfinite(_size(once)):
        return None
    if isfinite(_size(zero)) and any(bool(one.any()) for one in map(_entries, zero)):
        doubles = _gap([a + b for a, b in zip(zero, twice, strict=True)], once, once) <= _ROUGH
        return kind_of_own(zero) if doubles else "unknown"
    doubles = _gap(twice, once, once) <= _EXACT
    del zero, twice
    if doubles and (adds or is_lazy or not has_halves):
        return None
    if not is_cube and _gap(once, backward(1.0, None)) > _EXACT:
        return None  # it gives something else each time
    return "samplewise" if adds or (adds is None and adds_up()) else "batchwise"


def _gradients(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    seeds: Sequence[Tensor],
    *,
    is_cube: bool,
    retain_graph: bool = False,
) -> Gradients:
    """The gradients of the leaves, whose `.grad` stays as it is.

    Reentrant checkpoints know no other way than `.grad`; 3-D layers, which may leave sums for later, `autograd.grad`.
    """
    made: Any
    with graph_boundary.without_autocast():
        if is_cube:
            made = torch.autograd.grad(outputs, leaves, seeds, retain_graph=retain_graph, allow_unused=True)
        else:
            before = {leaf: leaf.grad for leaf in (*leaves, *graph_boundary.reachable(outputs)[1])}
            try:
                for leaf in before:
                    leaf.grad = None
                torch.autograd.backward(outputs, seeds, retain_graph=retain_graph)
                made = [leaf.grad for leaf in leaves]
            finally:
                for leaf, gradient in before.items():
                    leaf.grad = gradient
    pairs = zip(leaves, made, strict=True)
    return [torch.zeros_like(leaf) if one is None else one.to(leaf.dtype) for leaf, one in pairs]


def _seed(output: Tensor, factor: float, dims: Sequence[int], samples: int, half: int | None) -> Tensor:
    """A gradient of an output, the same for each call; 1 for a single number."""
    seed = torch.arange(output.numel(), device=output.device, dtype=torch.float32).mul_(0.7).cos_().mul_(factor)
    seed = seed.view(output.shape).to(output.dtype)
    if half is not None and dims and _has_rows(output, dims[0], samples):
        seed.narrow(dims[0], *_rows(samples, 1 - half)).zero_()
    return seed


@contextmanager
def _masking(nodes: Iterable[Node], samples: int, half: int | None) -> Iterator[None]:
    """Inside it a backward goes on with the gradient of one half of the samples, where it first has rows for them."""
    is_masked = half is None

    def mask(gradients: Sequence[Tensor | None], _: object) -> Any:
        nonlocal is_masked
        if is_masked:
            return None
        made = [_masked(one, samples, half) if one is not None and one.ndim else one for one in gradients]
        is_masked = any(one is not other for one, other in zip(made, gradients, strict=True))
        return tuple(made)

    handles = [] if half is None else [node.register_hook(mask) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _masked(gradient: Tensor, samples: int, half: int | None) -> Tensor:
    """The gradient of one half of the rows, which belong to samples, or to parts of the only one."""
    rows = samples if samples > 1 else next((n for n in gradient.shape if n > 1), 0)
    if half is None or rows < 2 or not gradient.numel() or (samples > 1 and len(gradient) % rows):
        return gradient
    made = gradient.clone(memory_format=torch.contiguous_format)
    made.view(rows, -1).narrow(0, *_rows(rows, 1 - half)).zero_()
    return made


def _rows(samples: int, half: int | None) -> tuple[int, int]:
    """Where half 0 or 1 of the samples begins, and how many it has; None: of all."""
    first = samples // 2
    return (0, samples) if half is None else (first, samples - first) if half else (0, first)


def _has_rows(tensor: Tensor, dim: int, samples: int) -> bool:
    return tensor.ndim > dim and tensor.shape[dim] == samples


def _sample_dims(tensor: Tensor, samples: int) -> list[int]:
    """Its dimensions, but the last one, that may be that of the samples."""
    return [dim for dim, size in enumerate(tensor.shape[:-1]) if size == samples]


def _entries(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _size(tensors: Sequence[Tensor]) -> float:
    """The norm of all of them; 0 for none."""
    norms = [
        torch.linalg.vector_norm(one, dtype=torch.promote_types(one.dtype, torch.float32)).double()
        for one in map(_entries, tensors)
    ]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _gap(total: Sequence[Tensor], *parts: Sequence[Tensor]) -> float:
    """How far the sum of the parts is from the total, relative to that."""
    rest = list(total)
    for part in parts:
        rest = [a - b for a, b in zip(rest, part, strict=True)]
    size = _size(total)
    return _size(rest) / size if size else _size(rest)


def _rounding(tensors: Sequence[Tensor], device: torch.device) -> float:
    """The relative error of the least exact numbers in a computation with these."""
    dtypes = [one.dtype for one in tensors]
    if torch.is_autocast_enabled(device.type):
        dtypes.append(torch.get_autocast_dtype(device.type))
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _functions(nodes: Iterable[Node]) -> str:
    """The names of the autograd functions in a graph that are neither torch's nor ours."""
    own = ("torch", "lightning_hanayo")
    names = {f.__name__ for f in graph_boundary.functions(nodes) if f.__module__.partition(".")[0] not in own}
    return f", {listed(sorted(names))}" if names else ""


def _block_kind(block: nn.Module) -> Any:
    """The same for blocks that are built alike, and trained alike."""
    modules = tuple((name, type(part)) for name, part in block.named_modules())
    return modules, tuple(parameter.requires_grad for parameter in block.parameters())


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


@contextmanager
def _undone(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside it the block may run; afterwards its attributes and buffers, and random generators, are as before."""
    states = generator_states(device)
    state = ModuleState(block, [block], "block")
    scanner = Scanner(list(state.holders.values()), state.clock)
    for holder in scanner.holders:
        holder.copy_tensors()
    try:
        yield
    finally:
        scanner.undo()
        set_generators(states, device)
