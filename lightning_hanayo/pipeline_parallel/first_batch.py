"""Proves by numbers, in the first training batch, that micro-batches add up to the batch that they were cut from.

One block of each kind runs again on the arguments that micro-batch 0 gave it:

    the samples of one half change    the other half's outputs stay    or there is a warning; in a cube, an error
    no gradient comes in              none goes out                    or it injects that of an auxiliary loss
    twice the gradient comes in       twice as much goes out           or halves must add up
    that of one half comes in         halves add up, but for rounding  or there is a warning; in a cube, an error

An injected gradient is the same whatever a micro-batch weighs. The one of twice as many samples tells which loss it is
of: of a mean, if it is as large: then gradients are averaged over micro-batches, at the end of a batch. Of a sum, if it
is twice as large: that is right as it is. The step's other code can't run on other samples; there it is an error. And
hooks on tensors are called with twice as many samples.
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
from lightning_hanayo.pipeline_parallel import graph_boundary
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture import forward_patch
from lightning_hanayo.pipeline_parallel.capture.carriers import NO_CARRIERS, Carriers, quiet
from lightning_hanayo.pipeline_parallel.capture.state import undone
from lightning_hanayo.pipeline_parallel.capture.threads import current_tracer
from lightning_hanayo.pipeline_parallel.capture.whole_step import WholeStep
from lightning_hanayo.pipeline_parallel.nan import MadeValues
from lightning_hanayo.pipeline_parallel.pytree import is_cache
from lightning_hanayo.pipeline_parallel.rng import generator_states, set_generators
from lightning_hanayo.pipeline_parallel.stages import find_loss

Findings = dict[str, list[str]]
"""A rank's findings: which blocks have "dependent" samples, or inject the gradient of a "mean", a "sum", "another"
loss or an "unknown" one, or change gradients in other ways, each sample's ("clamp") or all together ("mix")."""
Hook = Callable[[Tensor], Any]
_INJECTS = "adds a gradient of its own, such as that of an auxiliary loss, which would count once for each micro-batch"
_MIXES = "computes with the gradients of all samples of a micro-batch, such as g / g.norm()"
_DEPENDS = "outputs or gradients of some samples change with other samples"


@dataclass(eq=False, repr=False, kw_only=True)
class FirstBatch:
    """The proof, on one rank of a pipeline. All ranks call the same methods."""

    blocks: Mapping[int, nn.Module]
    """those that this rank runs, by their indices in the stack"""
    values: MadeValues
    device: torch.device
    num_microbatches: int
    num_data: int = 1
    """data ranks"""
    is_single: bool = False
    """whether the step runs in one piece"""
    is_cube: bool = False
    runs_blocks: bool = True
    """whether blocks run again; not those of known code"""
    shares_samples: bool = True
    """whether each rank of a cube runs the step on samples of its own, unless that runs once on the whole batch"""
    own_rows: Callable[[int], int] = int
    """of the samples of a step that all ranks of a cube run alike, how many this rank's blocks have"""
    carriers: Carriers = NO_CARRIERS
    share: Callable[[Findings], list[Findings]] = lambda own: [own]
    """gathers the findings of all ranks of the world"""
    warns: bool = True
    late_weight: float = field(default=1.0, init=False)
    """factor for the sum of gradients, in place of one for losses"""
    averages: bool = field(default=False, init=False)
    """whether that is a mean over micro-batches, too"""
    _runs_once: bool = field(default=False, init=False)
    _samples: int = field(default=0, init=False)
    _has_hooks: bool = field(default=False, init=False)

    @contextmanager
    def recording(self, *, runs_once: bool = False) -> Iterator[None]:
        """To be open while micro-batch 0 runs forward: keeps the arguments of blocks, and sees hooks on tensors.

        `runs_once`: the step runs on the whole batch, which its code outside the stack may mix.
        """
        self._runs_once = runs_once and self.num_data == 1
        first: dict[Any, int] = {}
        for index, block in self.blocks.items():
            parts = tuple((name, type(part)) for name, part in block.named_modules())
            first.setdefault((parts, tuple(one.requires_grad for one in block.parameters())), index)
        self.values.calls = dict.fromkeys(first.values())
        patched: Any = Tensor
        register = patched.register_hook
        patched.register_hook = lambda tensor, hook: register(tensor, self._checked(hook))
        try:
            yield
        finally:
            patched.register_hook = register

    def examine(self, batch: Batch, samples: int, whole: WholeStep | None = None) -> None:
        """Run blocks again, between the forward of micro-batch 0 and the first backward.

        Args:
            batch: it.
            samples: of micro-batch 0 in the step; 0 if not known. Ranks of a cube may have different ones.
            whole: of a step that runs on the whole batch.

        Raises:
            UnsupportedError: gradients wouldn't be those of the batch.
        """
        self._samples = samples if self.shares_samples and not batch.is_whole else self.own_rows(samples)
        calls, self.values.calls = self.values.calls, {}
        loss = find_loss(batch.results.get(0))
        before = [] if self.is_single or batch.step is None else tree_leaves(calls.get(0))
        if whole is not None:
            before = whole.arguments
            self._runs_once = self._runs_once and whole.backwards_before_stack(loss) <= 1
        roots = [one for one in (loss, *before) if isinstance(one, Tensor) and one.requires_grad]
        functions, found = graph_boundary.foreign_functions(roots), Findings()
        if self.is_single and not self.is_cube:  # as DDP does, which averages whatever gradients ranks have
            leaves = graph_boundary.reachable(roots)[1]
            if functions or self._has_hooks or any(leaf._backward_hooks for leaf in leaves):
                found["changes"] = []
        is_cut = self.num_microbatches > 1 or not self.is_single
        if self.is_cube or (is_cut and self.num_microbatches * self.num_data > 1):
            if batch.step is not None:
                batch.on_user_code(None)
            in_blocks = self._examine_blocks(calls, found)
            for node in functions:
                if type(node) not in in_blocks:
                    node.register_hook(self._check_function)
        self._conclude(self.share(found))

    def _examine_blocks(self, calls: dict[int, Any], found: Findings) -> set[type]:
        """Run one block of each kind; returns the kinds of nodes with functions of others."""
        in_blocks, states = set[type](), generator_states(self.device)
        for index in [index for index, call in calls.items() if call is not None and self.runs_blocks]:
            block, name = self.blocks[index], f"{type(self.blocks[index]).__name__} (block {index})"
            # it may fail, where it can't run again
            with quiet(self.carriers, block), undone(block, [block], "block"), suppress(Exception):
                run = _BlockRun(block, calls.pop(index), self._samples, self.device, is_cube=self.is_cube)
                own = {type(node) for node in graph_boundary.foreign_functions(run.graph()[0])}
                in_blocks |= own
                kinds = [run.kind_of_gradients() if own else "", "dependent" * run.is_dependent()]
                for kind in filter(None, kinds):
                    found.setdefault(kind, []).append(name)
            set_generators(states, self.device)
        return in_blocks

    def _conclude(self, findings: Sequence[Findings]) -> None:
        """Decide on all ranks alike where micro-batches are weighed: in their losses, or in the sum of gradients."""
        found = Findings()
        for kind, names in [item for one in findings for item in one.items()]:
            found.setdefault(kind, []).extend(names)
        for kind, does in ("unknown", _INJECTS), ("mix", _MIXES):
            for name in found.get(kind, ()):
                raise self._error(name, does)
        averaged = found.get("mean", []) + found.get("another", [])
        weighed = found.get("sum", []) + found.get("clamp", [])
        if averaged and weighed:
            raise self._error(averaged[0], f"adds the gradient of a mean over samples, unlike {weighed[0]}")
        if averaged:
            self.averages = True
            self.late_weight = 1 / (self.num_microbatches * self.num_data)
        elif "changes" in found:
            self.late_weight = 1 / self.num_data
        self._warn(
            found.get("another"),
            "the gradient of an auxiliary loss that isn't a mean over samples is averaged over all",
        )
        if self.is_cube and "dependent" in found:
            raise UnsupportedError(
                f"{listed(dict.fromkeys(found['dependent']))}: {_DEPENDS}, but on a cube each rank runs this code on "
                f"its own samples. Leave the cube out; pipelines run it on whole micro-batches."
            )
        self._warn(found.get("dependent"), f"{_DEPENDS}: those of one")

    def _warn(self, names: Sequence[str] | None, what: str) -> None:
        if names and self.warns and self.num_microbatches > 1:
            warnings.warn(
                f"{listed(dict.fromkeys(names))}: {what} of the {self.num_microbatches} micro-batches of a batch. The "
                f"training depends on num_microbatches, as with accumulate_grad_batches.",
                stacklevel=2,
            )

    def _error(self, name: str, does: str) -> UnsupportedError:
        return UnsupportedError(
            f"{name}: the backward {does}. Add such a loss to the step's (a block may store it), change "
            f"parameter.grad in on_before_optimizer_step, or set num_microbatches=1{' and cube=1' * self.is_cube}."
        )

    def _check_function(self, made: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> Any:
        """Called by autograd after the backward of a function in the step: runs it again, on zeros."""
        if self._runs_once and not self.averages:
            return None  # it counts once
        node: Any = torch._C._current_autograd_node()
        kept = tuple(None if one is None else one.clone() for one in made)  # it may change its results in place
        try:
            own = node.apply(*[None if one is None else torch.zeros_like(one) for one in gradients])
            size = _size([one for one in tree_leaves(own) if isinstance(one, Tensor)])
        except Exception:  # it can't run again
            return kept
        if 0 < size < inf:
            raise self._error(f"{node._forward_cls.__name__} in the step's code outside the stack", _INJECTS)
        return kept

    def _checked(self, hook: Hook) -> Hook:
        """The hook on a tensor. If it changes the gradient, it is checked once, after that."""
        self._has_hooks = True
        is_known, in_step = self.num_microbatches == 1, current_tracer() is not None

        def checked(gradient: Tensor) -> Any:
            nonlocal is_known
            made = hook(gradient)
            if made is not None and not (is_known or (in_step and self._runs_once)):
                is_known = True
                if not self._is_right(hook, _ramp(gradient)):
                    raise self._error(f"the hook {getattr(hook, '__qualname__', hook)}", _MIXES)
            return made

        return checked

    def _is_right(self, hook: Hook, gradient: Tensor) -> bool:
        """Whether the hook does the same in micro-batches as in the batch; true if it isn't known."""
        states = generator_states(self.device)
        dim = next((dim for dim, size in enumerate(gradient.shape[:-1]) if size == self._samples), 0)
        try:
            once, again, twice = hook(gradient.clone()), hook(gradient.clone()), hook(2 * gradient)
            if not _is_near([once], [again]):
                return True  # it draws random numbers, or counts
            if self.late_weight * self.num_data < 1:
                return _is_near([twice], [once], [once])
            return _is_near([once], [hook(torch.cat([gradient, 3 * gradient], dim)).narrow(dim, 0, once.shape[dim])])
        except Exception:  # it is made for one shape
            return True
        finally:
            set_generators(states, self.device)


class _BlockRun:
    """Runs a block again on its arguments, each time with the same random numbers."""

    def __init__(self, block: nn.Module, call: Any, samples: int, device: torch.device, *, is_cube: bool) -> None:
        values, self._spec = tree_flatten(call)
        # a cache would grow, or hold states, from run to run
        values = [None if is_cache(value) else value for value in values]
        self._values: list[Any] = [value.detach() if isinstance(value, Tensor) else value for value in values]
        tensors = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.ndim > 1 and not v.is_nested]
        floats = [i for i in tensors if values[i].is_floating_point()]
        self._streams = [i for i in floats if values[i].requires_grad] or floats[:1]
        self._block, self._device, self._is_cube, self._samples = block, device, is_cube, samples
        self._states = generator_states(device)
        shape = values[self._streams[0]].shape if self._streams else ()
        self._dims = [dim for dim, size in enumerate(shape[:-1]) if size == samples]
        """those that may be that of the samples"""
        self._tried = list(range(len(shape) - 1)) if is_cube else self._dims
        """the same on all ranks of a cube, which communicate, whatever samples they have"""
        if samples == 1 and self._dims and not is_cube:  # a single one can't be cut in halves
            self._values, self._dims, self._samples = self._joined(self._changed(self._dims[0])), self._dims[:1], 2
            self._tried = self._dims

    def is_dependent(self) -> bool:
        """Whether outputs of one half of the samples change with the other half. BatchNorm is warned of anyway."""
        if any(isinstance(part, _BatchNorm) and part.training for part in self._block.modules()):
            return False
        given = self._values
        # a new model's are small
        self._values = [8 * one if i in self._streams else one for i, one in enumerate(given)]
        try:
            with torch.no_grad():
                whole = self._run(self._values)
                stays = {dim: [self._stays(whole, dim, half) for half in (0, 1)] for dim in self._tried}
                again = self._run(self._values)
            # known only now, for ranks of a cube, which may differ, run alike; and it may drift from run to run
            is_repeatable = not _gap(whole, again) > self._rounding(whole)
            return is_repeatable and bool(self._dims) and not any(all(stays[dim]) for dim in self._dims)
        finally:
            self._values = given

    def kind_of_gradients(self) -> str:
        """Why they aren't proportional to those that come in, as in `Findings`; empty if they are, or not known."""
        zero, once, twice = (self._backward(factor) for factor in (0.0, 1.0, 2.0))
        # before anything is decided: ranks of a cube, which may differ, run alike
        halves = [self._backward(1.0, half) for half in (0, 1)] if self._tried else []
        if 0 < _size(zero) < inf:
            if self._is_cube or not self._dims:
                return "unknown"
            # compared with those of other samples, and of both together
            others = self._changed(self._dims[0])
            try:
                other, both = self._backward(0.0, values=others), self._backward(0.0, values=self._joined(others))
            except Exception:  # it can't run on as many samples
                return "unknown"
            triples = zip(zero, other, both, strict=True)
            added = [a + b if a.shape == c.shape else torch.cat([a, b], self._dims[0]) for a, b, c in triples]
            return "sum" if _is_near(added, both) else "mean" if _is_near(added, both, both) else "another"
        if not isfinite(_size(twice)) or not self._dims:
            return ""
        if _is_near(twice, once, once):
            return "dependent" * (_gap(once, *halves) > 2 * self._rounding(once))  # such as gradients in fp8
        return "clamp" if _is_near(once, *halves) else "mix"

    def _stays(self, whole: Sequence[Tensor], dim: int, half: int) -> bool:
        """Whether the outputs of one half stay where the other half changes, but for rounding."""
        made, rows = self._run(self._changed(dim, 1 - half)), _rows(self._samples, half)
        pairs = [(a, b) for a, b in zip(whole, made, strict=True) if self._has_rows(a, dim)]
        gaps = [_gap([a.narrow(dim, *rows)], [b.narrow(dim, *rows)]) for a, b in pairs]
        return not any(gap > self._rounding(whole) for gap in gaps)

    def _rounding(self, tensors: Sequence[Tensor]) -> float:
        dtypes = [one.dtype for one in tensors]
        if torch.is_autocast_enabled(self._device.type):
            dtypes.append(torch.get_autocast_dtype(self._device.type))
        return max([1e-6, *(torch.finfo(dtype).eps for dtype in dtypes)])

    def _backward(self, factor: float, half: int = -1, values: Sequence[Any] | None = None) -> list[Tensor]:
        """The gradients of the block's inputs and parameters, by a graph of their own: of all samples, or of a half."""
        outputs, leaves = self.graph(values)
        seeds = [_ramp(output) * factor for output in outputs]
        if half >= 0:
            dim = self._dims[0] if self._dims else 0
            for seed in seeds:
                if self._has_rows(seed, dim):
                    seed.narrow(dim, *_rows(self._samples, 1 - half)).zero_()
                elif half:  # it counts in the first half, such as a row of padding in a cube
                    seed.zero_()
        with graph_boundary.without_autocast():
            made: Any = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
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
        """The floating-point tensors in the block's output."""
        set_generators(self._states, self._device)
        if self._is_cube:
            patch = forward_patch.patch_of(self._block)
            patch.streams.begin_block(patch.index)  # the ranks draw alike
        args, kwargs = tree_unflatten([one.clone() if isinstance(one, Tensor) else one for one in values], self._spec)
        made = tree_leaves(forward_patch.run_uncompiled(self._block, *args, **kwargs))
        return [one for one in made if isinstance(one, Tensor) and one.is_floating_point()]

    def _changed(self, dim: int, half: int | None = None) -> list[Any]:
        """The block's arguments with other samples in one half, or in both."""
        changed = list(self._values)
        for i in [i for i in self._streams if self._has_rows(changed[i], dim)]:
            changed[i] = changed[i].clone()
            rows = changed[i].narrow(dim, *_rows(self._samples, half))
            rows.copy_(rows.roll(1, -1) * 1.5)
        return changed

    def _joined(self, others: Sequence[Any]) -> list[Any]:
        """The block's arguments for its samples and the others."""
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
    norms = [torch.linalg.vector_norm((one.coalesce().values() if one.is_sparse else one).double()) for one in tensors]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _gap(total: Sequence[Tensor], *parts: Sequence[Tensor]) -> float:
    """How far the sum of the parts is from the total, relative to that."""
    rest = list(total)
    for part in parts:
        rest = [a - b for a, b in zip(rest, part, strict=True)]
    return _size(rest) / (_size(total) or 1.0)


def _is_near(total: Sequence[Tensor], *parts: Sequence[Tensor]) -> bool:
    """Whether the parts add up, but for rounding: 5e-3 in fp32, 0.2 in bf16. NaN tells nothing."""
    return not _gap(total, *parts) > max(torch.finfo(one.dtype).eps for one in total) ** (1 / 3)
