"""Proves by numbers, in the first training batch, that micro-batches add up to the batch that they were cut from.

One block of each kind runs again on what micro-batch 0 gave it:

    what changes                        what must come of it             otherwise
    the samples of one half             the other half's outputs stay    a warning: samples depend on each other
    no gradient comes in                none goes out                    it injects that of an auxiliary loss
    twice the gradient comes in         twice as much goes out           right if halves add up, else an error

An `autograd.Function` may inject the gradient of an auxiliary loss, whatever a micro-batch weighs. The gradient for twice
as many samples tells of what loss it is: of a mean, if it is as large; then gradients of micro-batches are averaged at
the end of the batch. Of a sum, if it is twice as large, which is right as it is. Else it is averaged with a warning.

The step's other code can't run on other samples. There an injected loss is an error, and hooks on tensors are called
with twice as many samples.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
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
from lightning_hanayo.runtime.stages.first_last import find_loss
from lightning_hanayo.runtime.values import MadeValues

Findings = Mapping[str, Sequence[str]]
"""What a rank has found: which blocks have dependent samples, or inject a mean, a sum, another loss ("coupled"), an
unknown one, or change gradients that aren't proportional, sample by sample ("clamps") or together ("mixes")."""
Hook = Callable[[Tensor], Any]


@dataclass(eq=False, repr=False, kw_only=True)
class FirstBatch:
    """The proof, on one rank of a pipeline. All ranks call the same methods.

    Args:
        blocks: those that this rank runs, by their indices in the stack.
        names: of all blocks.
        values: notes what blocks are called with.
        device: this rank's.
        num_microbatches: of a batch.
        late_weight: of each micro-batch's gradients, should they be averaged.
        is_single: whether the step runs in one piece.
        is_cube: whether several ranks run each block.
        knows_samples: whether blocks have as many samples as the step.
        carriers: of what blocks store, record and log.
        share: gathers the findings of all ranks of the world.
        warns: whether this rank gives the warnings.
    """

    blocks: Mapping[int, nn.Module]
    names: Sequence[str]
    values: MadeValues
    device: torch.device
    num_microbatches: int
    late_weight: float
    is_single: bool = False
    is_cube: bool = False
    knows_samples: bool = True
    carriers: Carriers = NO_CARRIERS
    share: Callable[[Findings], list[Findings]] = lambda own: [own]
    warns: bool = True
    averages: bool = field(default=False, init=False)
    """whether gradients are averaged: then losses aren't weighed"""
    _samples: int = field(default=0, init=False)
    _has_hooks: bool = field(default=False, init=False)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """To be open while micro-batch 0 runs forward: keeps what blocks are called with, and sees hooks on tensors."""
        first: dict[Any, int] = {}
        for index, block in self.blocks.items():
            first.setdefault(_class_of(block), index)
        self.values.calls = dict.fromkeys(first.values())
        register: Any = Tensor.register_hook
        checking: Any = lambda tensor, hook: register(tensor, self._checked(hook))  # noqa: E731
        Tensor.register_hook = checking
        try:
            yield
        finally:
            Tensor.register_hook = register

    def examine(self, batch: Batch, samples: int) -> None:
        """Run blocks again, between the forward of micro-batch 0 and the first backward. `samples`: 0 if not known.

        Raises:
            UnsupportedError: gradients wouldn't be those of the batch.
        """
        self._samples, calls, self.values.calls = samples, self.values.calls, {}
        loss = find_loss(batch.results.get(0))
        roots = [] if loss is None else [loss]
        if not self.is_single:  # the code before the stack; in a cube it is cut off
            roots += [one for one in tree_leaves(calls.get(0)) if isinstance(one, Tensor) and one.requires_grad]
        found: dict[str, list[str]] = {}
        if self.is_single and not self.is_cube and self.num_microbatches == 1:
            if self._has_hooks or graph_boundary.may_change_gradients(roots):
                found["mean"] = ["the step"]  # data ranks average its gradients, whatever they are
        else:
            functions = self._examine_blocks(batch, calls, found)
            for node in graph_boundary.foreign_functions(roots) if batch.step is not None else ():
                if type(node) not in functions:
                    node.register_hook(self._check_function)
        self._conclude(self.share(found))

    def _examine_blocks(self, batch: Batch, calls: dict[int, Any], found: dict[str, list[str]]) -> set[type]:
        """Run one block of each kind; returns the kinds of their autograd functions."""
        functions: set[type] = set()
        if batch.step is not None:
            batch.on_user_code(None)
        for index in [index for index, call in calls.items() if call is not None]:
            block = self.blocks[index]
            with self.carriers.quiet(block), _undone(block, self.device), suppress(Exception):  # it can't run again
                samples = self._samples if self.knows_samples else 0
                run = _BlockRun(block, calls.pop(index), samples, self.device, is_cube=self.is_cube)
                kinds = ["dependent" * run.is_dependent()]
                own = {type(node) for node in graph_boundary.foreign_functions(run.graph()[0])}
                functions |= own
                if own or self._has_hooks:
                    kinds.append(run.kind_of_gradients())
                for kind in filter(None, kinds):
                    found.setdefault(kind, []).append(f"{type(block).__name__} ({self.names[index]})")
        return functions

    def _conclude(self, findings: Sequence[Findings]) -> None:
        """Decide on all ranks alike where micro-batches are weighed: in their losses, or in the sum of gradients."""
        found: dict[str, list[str]] = {}
        for kind, names in [item for one in findings for item in one.items()]:
            found.setdefault(kind, []).extend(names)
        for name in found.get("unknown", ()):
            raise self._error(name, _INJECTS)
        for name in found.get("mixes", ()):
            raise self._error(name, _MIXES)
        averaged = found.get("mean", []) + found.get("coupled", [])
        weighed = found.get("sum", []) + found.get("clamps", [])
        if averaged and weighed:
            raise self._error(
                averaged[0],
                f"adds the gradient of a mean over samples, and {weighed[0]} that of a sum, or changes that of each "
                f"sample. No weights of micro-batches are right for both",
            )
        self.averages = bool(averaged)
        texts = {
            "coupled": "the backward adds the gradient of an auxiliary loss that is no mean over samples, as most that "
            "balance loads aren't. It is averaged over",
            "dependent": "the outputs of some samples change with other samples. These are the samples of one of",
        }
        for kind in texts if self.warns and self.num_microbatches > 1 else ():
            if kind in found:
                warnings.warn(
                    f"{listed(dict.fromkeys(found[kind]))}: {texts[kind]} the {self.num_microbatches} micro-batches of "
                    f"a batch: the training depends on num_microbatches, as with accumulate_grad_batches.",
                    stacklevel=2,
                )

    def _error(self, name: str, does: str) -> UnsupportedError:
        return UnsupportedError(
            f"{name}: its backward {does}. Add auxiliary losses to the one that the step returns (a block may store "
            f"it: self.aux = ...); change parameter.grad in on_before_optimizer_step, or the gradient of each sample "
            f"alone; or set num_microbatches=1{' and cube=1' * self.is_cube}."
        )

    def _check_function(self, _: object, gradients: Sequence[Tensor | None]) -> None:
        """Called by autograd after the backward of a function in the step: runs it again, on zeros."""
        node: Any = graph_boundary.current_node()
        try:
            made = node.apply(*[None if one is None else torch.zeros_like(one) for one in gradients])
            size = _size([one for one in tree_leaves(made) if isinstance(one, Tensor)])
        except Exception:  # it can't run again
            return
        if 0 < size < inf:
            raise self._error(f"{node._forward_cls.__name__} in the step's code outside the stack", _INJECTS)

    def _checked(self, hook: Hook) -> Hook:
        """The hook on a tensor. If it changes the gradient, it is checked once, after that."""
        self._has_hooks, is_known = True, self.num_microbatches == 1

        def checked(gradient: Tensor) -> Any:
            nonlocal is_known
            made = hook(gradient)
            if made is not None and not is_known:
                is_known = True
                if not self._is_right(hook, _ramp(gradient)):
                    raise self._error(f"the hook {getattr(hook, '__qualname__', hook)}", _MIXES)
            return made

        return checked

    def _is_right(self, hook: Hook, gradient: Tensor) -> bool:
        """Whether the hook does the same in micro-batches as in the batch; true if it isn't known."""
        states = generator_states(self.device)
        try:
            once = hook(gradient.clone())
            if not _is_near([once], [hook(gradient.clone())]):
                return True  # it draws random numbers, or counts
            if self.averages:
                return _is_near([hook(2 * gradient)], [once], [once])
            dims = [dim for dim, size in enumerate(gradient.shape[:-1]) if size == self._samples] or [0]
            joined = [(dim, hook(torch.cat([gradient, 3 * gradient], dim))) for dim in dims]
            return any(_is_near([made.narrow(dim, 0, once.shape[dim])], [once]) for dim, made in joined)
        except Exception:  # it is made for one shape
            return True
        finally:
            set_generators(states, self.device)


_INJECTS = "adds a gradient of its own, such as that of an auxiliary loss, which would count once for each micro-batch"
_MIXES = "computes with the gradients of all samples of a micro-batch, such as g / g.norm()"


class _BlockRun:
    """Runs a block again on what it was called with, each time with the same random numbers."""

    def __init__(self, block: nn.Module, call: Any, samples: int, device: torch.device, *, is_cube: bool) -> None:
        values, self._spec = tree_flatten(call)
        self._values: list[Any] = [value.detach() if isinstance(value, Tensor) else value for value in values]
        floats = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point() and v.ndim > 1]
        self._streams = [i for i in floats if values[i].requires_grad] or floats[:1]
        self._block, self._device, self._is_cube, self._samples = block, device, is_cube, samples
        self._states = generator_states(device)
        shape = values[self._streams[0]].shape if self._streams else ()
        self._dims = [dim for dim, size in enumerate(shape[:-1]) if size == samples]
        """those that may be that of the samples"""
        if is_cube:
            self._dims = self._dims[:1] if samples > 1 else []  # so that all ranks run equally often
        elif samples == 1 and self._dims:  # a single one can't be cut in halves
            self._values, self._dims, self._samples = self._joined(self._changed()), self._dims[:1], 2

    def is_dependent(self) -> bool:
        """Whether outputs of one half of the samples change with the other half. BatchNorm is warned of anyway."""
        if any(isinstance(part, _BatchNorm) and part.training for part in self._block.modules()):
            return False
        with torch.no_grad():
            whole = self._run(self._values)
            for dim in self._dims:
                if all([self._stays(whole, dim, half) for half in (0, 1)]):
                    self._dims = [dim]
                    return False
        return bool(self._dims)

    def kind_of_gradients(self) -> str:
        """Why they aren't proportional to those that come in: as in `Findings`; empty if they are, or not known."""
        zero, once, twice = (self._backward(factor) for factor in (0.0, 1.0, 2.0))
        if not all(isfinite(_size(gradients)) for gradients in (zero, once, twice)):
            return ""
        if _size(zero):
            return "unknown" if self._is_cube or not self._dims else self._kind_of_injected(zero)
        if _is_near(twice, once, once) or not self._dims:
            return ""
        return "clamps" if _is_near(once, self._backward(1.0, 0), self._backward(1.0, 1)) else "mixes"

    def _kind_of_injected(self, own: Sequence[Tensor]) -> str:
        """Of what loss these gradients are: compares them with those of other samples, and of both together."""
        dim, others = self._dims[0], self._changed()
        try:
            of_others, of_both = self._backward(0.0, values=others), self._backward(0.0, values=self._joined(others))
        except Exception:  # it can't run on as many samples
            return "unknown"
        triples = zip(own, of_others, of_both, strict=True)
        added = [a + b if a.shape == both.shape else torch.cat([a, b], dim) for a, b, both in triples]
        return "sum" if _is_near(added, of_both) else "mean" if _is_near(added, of_both, of_both) else "coupled"

    def _stays(self, whole: Sequence[Tensor], dim: int, half: int) -> bool:
        """Whether the outputs of one half stay where the other half changes."""
        made, rows = self._run(self._changed(dim, 1 - half)), _rows(self._samples, half)
        pairs = [(a, b) for a, b in zip(whole, made, strict=True) if self._has_rows(a, dim)]
        tolerance = max([1e-6, *(_rounding(a, self._device) for a, _ in pairs)])
        return not any(_gap([a.narrow(dim, *rows)], [b.narrow(dim, *rows)]) > tolerance for a, b in pairs)

    def _backward(
        self, factor: float, half: int | None = None, *, values: Sequence[Any] | None = None
    ) -> list[Tensor]:
        """The gradients of the block's inputs and parameters, by a graph of their own: of all samples, or of a half."""
        outputs, leaves = self.graph(values)
        seeds = [_ramp(output) * factor for output in outputs]
        for seed in [] if half is None else seeds:
            if self._has_rows(seed, self._dims[0]):
                seed.narrow(self._dims[0], *_rows(self._samples, 1 - half)).zero_()
        with graph_boundary.without_autocast():
            made = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
        return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, made, strict=True)]

    def graph(self, values: Sequence[Any] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """The block's differentiable outputs, and its inputs and parameters that they may depend on."""
        inputs = list(self._values if values is None else values)
        for i in self._streams:
            inputs[i] = inputs[i].detach().requires_grad_()
        made = [output for output in self._run(inputs) if output.requires_grad]
        leaves = [inputs[i] for i in self._streams] + [one for one in self._block.parameters() if one.requires_grad]
        return [output for output in made if output.ndim > 1] or made[:1], leaves

    def _run(self, values: Sequence[Any]) -> list[Tensor]:
        """The tensors of numbers in what the block returns."""
        set_generators(self._states, self._device)
        copies = [value.clone() if isinstance(value, Tensor) else value for value in values]
        args, kwargs = tree_unflatten(copies, self._spec)
        made = tree_leaves(forward_patch.run_uncompiled(self._block, *args, **kwargs))
        return [one for one in made if isinstance(one, Tensor) and one.is_floating_point()]

    def _changed(self, dim: int | None = None, half: int | None = None) -> list[Any]:
        """What it is called with, with other samples in one half, or in both."""
        changed, dim = list(self._values), self._dims[0] if dim is None else dim
        for i in [i for i in self._streams if self._has_rows(changed[i], dim)]:
            changed[i] = changed[i].clone()
            rows = changed[i].narrow(dim, *_rows(self._samples, half))
            rows.copy_(rows.roll(1, -1) * 1.5)
        return changed

    def _joined(self, others: Sequence[Any]) -> list[Any]:
        """What it is called with, for its samples and the others."""
        dim, pairs = self._dims[0], zip(self._values, others, strict=True)
        return [torch.cat(pair, dim) if self._has_rows(pair[0], dim) else pair[0] for pair in pairs]

    def _has_rows(self, value: Any, dim: int) -> bool:
        return isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] == self._samples


def _ramp(like: Tensor) -> Tensor:
    """A gradient of that shape, the same for each call."""
    ramp = torch.arange(1, like.numel() + 1, device=like.device, dtype=torch.float32).mul_(0.7).cos_()
    return ramp.view(like.shape).to(like.dtype)


def _rows(samples: int, half: int | None) -> tuple[int, int]:
    """Where half 0 or 1 of the samples begins, and how many it has; None: of all."""
    first = samples // 2
    return (0, samples) if half is None else (first, samples - first) if half else (0, first)


def _size(tensors: Sequence[Tensor]) -> float:
    """The norm of all of them; 0 for none."""
    dense = [one.coalesce().values() if one.is_sparse else one for one in tensors]
    norms = [torch.linalg.vector_norm(one.double()) for one in dense]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _gap(total: Sequence[Tensor], *parts: Sequence[Tensor]) -> float:
    """How far the sum of the parts is from the total, relative to that."""
    rest = list(total)
    for part in parts:
        rest = [a - b for a, b in zip(rest, part, strict=True)]
    return _size(rest) / (_size(total) or 1.0)


def _is_near(total: Sequence[Tensor], *parts: Sequence[Tensor]) -> bool:
    """Whether the parts add up, but for rounding: 5e-3 in fp32, 0.2 in bf16. NaN tells nothing."""
    epsilon = max(torch.finfo(one.dtype).eps for one in total)
    return not _gap(total, *parts) > epsilon ** (1 / 3)


def _rounding(tensor: Tensor, device: torch.device) -> float:
    """The relative error of the least exact numbers in a computation that ends with these."""
    own, is_cast = torch.finfo(tensor.dtype).eps, torch.is_autocast_enabled(device.type)
    return max(own, torch.finfo(torch.get_autocast_dtype(device.type)).eps) if is_cast else own


def _class_of(block: nn.Module) -> Any:
    """The same for blocks that are built alike, and trained alike."""
    modules = tuple((name, type(part)) for name, part in block.named_modules())
    return modules, tuple(parameter.requires_grad for parameter in block.parameters())


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
