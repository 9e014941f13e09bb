"""Finds out, by numbers on the user's own batch, whether the steps of micro-batches add up to one step, and how.

    some samples together    dry step  ->  gradient at the stack's output    g[a]           g[b]
    the same in two parts    dry steps ->                                    ga             gb
                                                                             g[a] = w_a ga  g[b] = w_b gb

If one number w_a, and one w_b, does that in several draws of outputs of the stack, these are the weights of the parts'
losses, and all rules that give them are kept: samples, labels, sums of masks, or 1 each. Else the loss is none of
micro-batches, and so it is if blocks get other arguments, or logged values differ whatever the rule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.microbatches import PieceSizes
from lightning_hanayo.pipeline_parallel.batches.plan import BatchSource, children, with_children
from lightning_hanayo.pipeline_parallel.capture.dry_step import DrySteps, Ran
from lightning_hanayo.pipeline_parallel.capture.whole_step import grown_dim, tensors_of_calls
from lightning_hanayo.pipeline_parallel.rng import generator_states, set_generators
from lightning_hanayo.pipeline_parallel.stages import find_loss
from lightning_hanayo.strategy.batch_split import BatchSplitter, SplitBatch
from lightning_hanayo.strategy.lightning.metrics import copy_state, recorded_logs, restore_state
from lightning_hanayo.strategy.probing.rules import NAMED, Named, Rule, named_tensors, possible_rules

DRAWS, WHOLE_DRAWS = 4, 2
"""of outputs of the stack: a loss of the largest values of few samples is a mean over samples in one of them"""
NOISE = 0.1
SAMPLED = 2**14
"""elements of each gradient outside the stack that are compared"""
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that arithmetic explains: of gradients, and of their proportion."""

    residual: float = 1e-5
    weight: float = 1e-5


EXACT, ROUGH = Tolerance(), Tolerance(3e-2, 4e-3)


@dataclass(frozen=True)
class Verdict:
    """What a probe has shown: rules that fit, a difference that none explains, or neither."""

    rules: tuple[Rule, ...] = ()
    logged: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    """for each logged value the rules that fit"""
    difference: str = ""
    """what differs between one step and steps of micro-batches, whatever the rule"""
    unknown: str = ""
    """why it can't be told from this batch"""
    tried: tuple[Rule, ...] = ()
    """the rules that this batch tells of"""
    can_be_cut: bool = True
    """whether the blocks' arguments of the whole batch can be cut into micro-batches"""


Differ = Callable[[Sequence[Named], Sequence[int]], int]
"""In how many ways the rules that come into question weigh pieces of these sizes; 0: in one of them a piece has none"""


class _Differs(Exception):
    """Steps of parts don't add up."""


class _Unknown(Exception):
    """It can't be told."""


class _CannotBeCut(_Unknown):
    """It can't, as the blocks' arguments of all samples can't be cut into those of parts."""


@dataclass
class _Run:
    """A dry run of some samples: what it has shown, and its gradients."""

    ran: Ran
    loss: Tensor | None
    gradients: list[Tensor]
    """at the outputs of the stack"""
    outside: dict[str, Tensor]
    """at parameters outside: some elements"""
    logged: dict[tuple[str, int], tuple[Any, Mapping[str, Any]]]
    is_random: bool
    calls_logger: bool


@dataclass
class Probe:
    """Probes batches of one run on one rank.

    Args:
        steps: runs dry steps.
        trainer: whose step they run.
        splitter: cuts micro-batches.
        outside: the modules outside the stack.
        device: of this rank.
        named: weighs pieces by the rule that the user has named, which is tried, too.
    """

    steps: DrySteps
    trainer: "pl.Trainer"
    splitter: BatchSplitter
    outside: Sequence[nn.Module]
    device: torch.device
    named: Callable[[Sequence[Any], PieceSizes], Sequence[float]] | None = None
    sample_bytes: float = field(default=0.0, init=False)
    """that the code outside the stack needs for each sample, at most"""

    def probe(
        self,
        batch: Any,
        split: SplitBatch,
        source: BatchSource,
        step: Callable[[Any], Any],
        fits: Callable[[float], bool],
        differ: Differ,
    ) -> Verdict:
        """Probe a batch, which stays as it is.

        All of it and its micro-batches are compared, if so many bytes `fits` in memory; else some samples and halves
        of them, on which rules differ most.

        Args:
            batch: the whole.
            split: the same in micro-batches.
            source: where it comes from.
            step: runs the user's step.
            fits: whether so many bytes are free.
            differ: tells on which pieces rules differ most.
        """
        precisely = torch.autocast(self.device.type, enabled=False)
        if torch.is_autocast_enabled(self.device.type):
            with precisely:
                verdict = self._probe(batch, split, source, step, fits, differ)
            if not verdict.unknown:
                return verdict
        return self._probe(batch, split, source, step, fits, differ)

    def needed(self, samples: int) -> float:
        """The bytes that a training step of so many samples needs outside the stack, at most."""
        return 2 * samples * self.sample_bytes + sum(parameter.nbytes for parameter in self._names())

    def _probe(
        self,
        batch: Any,
        split: SplitBatch,
        source: BatchSource,
        step: Callable[[Any], Any],
        fits: Callable[[float], bool],
        differ: Differ,
    ) -> Verdict:
        if not split.shares:
            return Verdict(unknown="the samples of its micro-batches can't be counted", can_be_cut=False)
        with self.steps.running(), self._undone():
            try:
                some = min(zip(split.shares, split.pieces, strict=True), key=lambda pair: pair[0])
                self.sample_bytes = self._run(step, some[1], lambda _, made: made).ran.num_bytes / some[0]
            except Exception as error:
                unknown = f"a dry run of the step fails ({type(error).__name__}: {error})"
                return Verdict(unknown=unknown, can_be_cut=not isinstance(error, UnsupportedError))
            if fits(self.needed(sum(split.shares))):
                union, parts, draws = batch, split, WHOLE_DRAWS
            else:
                found = self._choose(split, source, differ)
                if found is None:
                    return Verdict(unknown="no two samples of a micro-batch can be cut apart")
                union, parts, draws = *found, DRAWS
            return self._compare(union, parts, step, draws)

    def _choose(self, split: SplitBatch, source: BatchSource, differ: Differ) -> tuple[Any, SplitBatch] | None:
        """Samples, and the same in two parts: those on which rules differ most."""
        found: list[tuple[int, Any, SplitBatch]] = []
        for piece in split.pieces:
            with suppress(HanayoError):
                parts = self.splitter.split(own_copy(piece), 2, source)
                if parts.num_microbatches == 2 and parts.shares:
                    found.append((differ(list(map(named_tensors, parts.pieces)), parts.shares), piece, parts))
        return max(found, key=lambda one: one[0])[1:] if found else None

    def _compare(
        self,
        union: Any,
        parts: SplitBatch,
        step: Callable[[Any], Any],
        draws: int,
    ) -> Verdict:
        named, sizes = list(map(named_tensors, parts.pieces)), list(parts.shares)
        possible = list(possible_rules(named))
        made: dict[Rule, Sequence[float] | None] = {rule: rule.weights(named, sizes) for rule in possible}
        if self.named is not None:
            possible.append(NAMED)
            made[NAMED] = self.named(parts.pieces, parts.sizes)
        logged: dict[str, list[Rule]] = {}
        kept, is_known = possible, False
        outputs = _Outputs(sizes)
        try:
            for draw in range(draws):
                whole, runs = self._runs(step, union, parts, outputs, draw)
                is_low = any(one.dtype in _HALF for one in whole.gradients)
                tolerance = ROUGH if is_low or torch.is_autocast_enabled(self.device.type) else EXACT
                try:
                    if not draw:
                        _check_arguments(whole, runs, sizes, tolerance)
                        self._check_state(step, parts.pieces[0], whole, runs)
                    weights = _weights(whole, runs, outputs, tolerance)
                    _check_outside(whole, runs, weights, tolerance)
                    if any(weight is not None for weight in weights):
                        is_known = True
                        kept = [rule for rule in kept if _fits(made[rule], weights, tolerance.weight)]
                    if not kept:
                        raise _Differs(f"{_shown(weights, sizes)}, which no rule explains")
                    _check_logged(whole, runs, made, logged, tolerance.residual)
                except _Differs as difference:
                    if whole.is_random:
                        raise _Unknown("the step draws random numbers, and its results differ") from difference
                    raise
            if not is_known:
                raise _Unknown("the loss has no gradient at the stack's output")
        except _Differs as difference:
            return Verdict(difference=str(difference))
        except _Unknown as reason:
            return Verdict(unknown=str(reason), can_be_cut=not isinstance(reason, _CannotBeCut))
        tried = tuple(rule for rule in possible if made[rule] is not None)
        return Verdict(tuple(kept), {key: tuple(own) for key, own in logged.items()}, tried=tried)

    def _runs(
        self, step: Callable[[Any], Any], union: Any, parts: SplitBatch, outputs: "_Outputs", draw: int
    ) -> tuple[_Run, list[_Run]]:
        """Dry runs of the samples together, and of their parts, which begin with the same random numbers."""
        states = generator_states(self.device)
        try:
            whole = self._run(step, union, outputs.of_union(draw))
        except Exception as error:
            kind = _CannotBeCut if isinstance(error, UnsupportedError) else _Unknown
            raise kind(f"a dry run of the step fails ({type(error).__name__}: {error})") from error
        runs = []
        for number, piece in enumerate(parts.pieces):
            set_generators(states, self.device)
            try:
                runs.append(self._run(step, piece, outputs.of_part(number)))
            except UnsupportedError as error:
                raise _CannotBeCut(str(error)) from error
            except Exception as error:
                raise _Differs(f"the step fails on fewer samples ({type(error).__name__}: {error})") from error
        return whole, runs

    def needs(self, split: SplitBatch, source: BatchSource, step: Callable[[Any], Any]) -> float | None:
        """The bytes that the code outside the stack needs for each sample of an evaluation's batch, at most.

        None where a whole batch can't be cut into micro-batches in front of the stack.
        """
        try:
            found = self._choose(split, source, lambda *_: 1)
            if found is None:
                return None
            union, parts = found
            sizes = list(parts.shares)
            outputs = _Outputs(sizes)
            with self.steps.running(), self._undone():
                whole = self._run(step, union, outputs.of_union(0))
                part = self._run(step, parts.pieces[0], outputs.of_part(0))
                _check_arguments(whole, [part], sizes, Tolerance(float("inf"), 0.0))
        except Exception:
            return None
        shapes = [[tuple(tensor.shape) for tensor in call.tensors] for call in whole.ran.calls]
        repeats = all(shapes[i] == shapes[i % 2] for i in range(len(shapes)))  # else later passes can't be cut
        return whole.ran.num_bytes / sum(sizes) if repeats else None

    def _check_state(self, step: Callable[[Any], Any], samples: Any, whole: _Run, parts: Sequence[_Run]) -> None:
        """Check that numbers and buffers that steps change are as after one step, once those of all parts have run.

        So are sums over samples, and what further steps leave as it is.

        Raises:
            _Differs: they aren't.
        """
        first = parts[0].ran.after
        for name in self.steps.run(step, own_copy(samples), after=first).after if first else ():
            with suppress(KeyError, RuntimeError):  # a part leaves it as it is, or its shape changes
                before, after = (torch.as_tensor(state[name]).double() for state in (whole.ran.before, whole.ran.after))
                changes = [torch.as_tensor(one.ran.after[name]).double() - before for one in parts]
                if torch.allclose(before + torch.stack(changes).sum(0), after):
                    continue
            raise _Differs(f"{name} differs, which each step changes")

    def _run(self, step: Callable[[Any], Any], samples: Any, given: Any) -> _Run:
        before = generator_states(self.device)
        with recorded_logs(self.trainer) as recorded:
            ran = self.steps.run(step, own_copy(samples), given)
        after = generator_states(self.device)
        is_random = any(not torch.equal(before[name], after[name]) for name in before)
        loss = find_loss(ran.result)
        gradients, outside = self._gradients(ran, loss)
        return _Run(ran, loss, gradients, outside, recorded.logged, is_random, recorded.calls_logger)

    def _gradients(self, ran: Ran, loss: Tensor | None) -> tuple[list[Tensor], dict[str, Tensor]]:
        leaves = [one for one in ran.tensors if one.requires_grad]
        if loss is None or not loss.requires_grad:
            return [torch.zeros_like(one) for one in leaves], {}
        if loss.numel() != 1:
            raise _Unknown("the step returns no loss of one element")
        names = self._names()
        made: Sequence[Tensor | None] = torch.autograd.grad(loss.reshape(()), [*leaves, *names], allow_unused=True)
        at_outputs = [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, made, strict=False)]
        sampled = {
            name: one.to_dense() if one.is_sparse else one.flatten()[:: max(1, one.numel() // SAMPLED)].clone()
            for name, one in zip(names.values(), made[len(leaves) :], strict=True)
            if one is not None
        }
        return at_outputs, sampled

    def _names(self) -> dict[nn.Parameter, str]:
        outside = {id(module) for module in self.outside}
        return {
            parameter: f"{prefix}.{name}" if prefix else name
            for prefix, module in self.trainer.lightning_module.named_modules()
            if id(module) in outside
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and not parameter.is_meta
        }

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Metrics, random numbers and the wish to stop are as before afterwards."""
        metrics = [part for part in self.trainer.lightning_module.modules() if isinstance(part, Metric)]
        saved = [(metric, copy_state(metric)) for metric in metrics]
        states, stops = generator_states(self.device), self.trainer.should_stop
        try:
            yield
        finally:
            self.trainer.should_stop = stops
            set_generators(states, self.device)
            for metric, state in saved:
                restore_state(metric, state)


class _Outputs:
    """What the steps of the samples together, and of their parts, get from the stack.

    Args:
        sizes: the samples of each part.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._first: list[Tensor] = []
        """of the samples together, as their first block made them"""
        self.union: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(0)
        """the step's own numbers are as before"""
        self.dims: dict[int, int | None] = {}
        """of each tensor, along which the samples are"""

    def of_union(self, draw: int) -> Any:
        """Makes them for the samples together: in later draws samples have each other's, with noise."""
        self.union = []

        def given(start: int, made: Sequence[Tensor]) -> Sequence[Tensor]:
            if not draw:
                self._first[start:] = [one.detach().clone() for one in made]
            own = [self._drawn(start + i) for i in range(len(made))] if draw else list(made)
            self.union += own
            return own

        return given

    def of_part(self, number: int) -> Any:
        """Makes them for a part: what its samples had together with the others."""

        def given(start: int, made: Sequence[Tensor]) -> Sequence[Tensor]:
            return [self.part(self.union[start + i], start + i, number, one) for i, one in enumerate(made)]

        return given

    def part(self, whole: Tensor, index: int, number: int, like: Tensor | None = None) -> Tensor:
        """A part of a tensor that is as large as the whole output."""
        total = sum(self._sizes)
        if like is not None and index not in self.dims:
            self.dims[index] = grown_dim(whole, like, self._sizes[number] / total)
        dim = self.dims.get(index)
        if dim is None:
            return whole
        each = whole.shape[dim] // total
        return whole.narrow(dim, sum(self._sizes[:number]) * each, self._sizes[number] * each)

    def _drawn(self, index: int) -> Tensor:
        one, dim = self._first[index], self.dims.get(index)
        if not one.is_floating_point():
            return one
        if dim is not None and one.shape[dim] % sum(self._sizes) == 0:
            each = one.shape[dim] // sum(self._sizes)
            order = torch.randperm(sum(self._sizes), generator=self._generator).repeat_interleave(each) * each
            order += torch.arange(each).repeat(sum(self._sizes))
            one = one.index_select(dim, order.to(one.device))
        return one + NOISE * one.std() * torch.randn(one.shape, generator=self._generator).to(one)


def _shown(weights: Sequence[float | None], sizes: Sequence[int]) -> str:
    numbers = ", ".join("?" if one is None else f"{one:.4g}" for one in weights[:8])
    return f"the losses of {', '.join(map(str, sizes[:8]))} samples have the weights {numbers} in their common loss"


def _weights(whole: _Run, parts: Sequence[_Run], outputs: _Outputs, tolerance: Tolerance) -> list[float | None]:
    """The weight of each part's loss in the loss of all; None: no gradient tells.

    Raises:
        _Differs: there is none.
    """
    indices = [i for i, one in enumerate(whole.ran.tensors) if one.requires_grad]
    weights: list[float | None] = []
    size = _norm(whole.gradients)
    for number, part in enumerate(parts):
        expected = [outputs.part(g, i, number) for g, i in zip(whole.gradients, indices, strict=True)]
        given = part.gradients
        if len(given) != len(expected):
            raise _Differs("the passes through the stack differ")
        if any(bool(one.isnan().any()) for one in given):
            if _norm(expected):
                raise _Differs("the loss of some samples alone is NaN, and that of all isn't")
            weights.append(0.0)
            continue
        square = _dot(given, given)
        if not square:
            if _norm(expected) > tolerance.residual * size:
                raise _Differs("the gradient at the stack's output is 0 for some samples alone, and isn't with others")
            weights.append(None)
            continue
        weight = _dot(expected, given) / square
        rest = [one - weight * other for one, other in zip(expected, given, strict=True)]
        share = _norm(rest) / max(size, 1e-300)
        if not share <= tolerance.residual:
            raise _Differs(f"the gradient at the stack's output differs by {share:.2g}, whatever the weights")
        weights.append(weight)
    return weights


def _check_arguments(whole: _Run, parts: Sequence[_Run], sizes: Sequence[int], tolerance: Tolerance) -> None:
    """Check that blocks get the same from the steps of parts.

    Raises:
        _Differs: they don't.
    """
    total, starts = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
    for number, part in enumerate(parts):
        if len(part.ran.calls) != len(whole.ran.calls):
            raise _Differs("the passes through the stack differ")
        for i, (call, own) in enumerate(zip(whole.ran.calls, part.ran.calls, strict=True)):
            of_part = dict(tensors_of_calls(own, first=i % 2 == 0))
            for path, tensor in tensors_of_calls(call, first=i % 2 == 0):
                if path not in of_part:
                    continue  # a mask that masks nothing
                found = of_part[path].detach()
                try:
                    dim = grown_dim(tensor, found, sizes[number] / total)
                except UnsupportedError as error:
                    raise _CannotBeCut(
                        f"an argument of the blocks {tuple(tensor.shape)} has no dimension of the samples"
                    ) from error
                expected = tensor.detach()
                if dim is not None:
                    each = tensor.shape[dim] // total
                    expected = expected.narrow(dim, starts[number] * each, sizes[number] * each)
                share = _difference(expected, found)
                if share > tolerance.residual:
                    raise _Differs(f"an argument of the blocks {tuple(tensor.shape)} differs by {share:.2g}")


def _check_outside(whole: _Run, parts: Sequence[_Run], weights: Sequence[float | None], tolerance: Tolerance) -> None:
    """Check that the gradients of parameters outside the stack add up.

    Raises:
        _Differs: they don't.
    """
    for name, expected in whole.outside.items():
        added = torch.zeros_like(expected)
        for part, weight in zip(parts, weights, strict=True):
            if weight and name in part.outside:
                added += weight * part.outside[name]
        share = _difference(expected, added)
        if share > 10 * tolerance.residual and all(weight is not None for weight in weights):
            raise _Differs(f"the gradient of {name} differs by {share:.2g}")


def _check_logged(
    whole: _Run,
    parts: Sequence[_Run],
    made: Mapping[Rule, Sequence[float] | None],
    logged: dict[str, list[Rule]],
    tolerance: float,
) -> None:
    """Keep those rules by which logged and returned values of parts make those of all.

    Raises:
        _Differs: a value has none.
    """
    if whole.calls_logger:
        raise _Differs("the step calls log_metrics of a logger")
    missing = [name for name, _ in whole.logged.keys() ^ {key for part in parts for key in part.logged}]
    some = [name for part in parts for name, _ in whole.logged.keys() - part.logged.keys()]
    if missing or some:
        raise _Differs(f"the value {(missing or some)[0]!r} is logged for some samples alone")
    for key, (value, options) in whole.logged.items():
        name, number = key
        if isinstance(value, Metric):
            continue
        values = [float(part.logged[key][0]) for part in parts]
        expected = float(value)
        if str(options.get("reduce_fx", "mean")) not in ("mean", "avg"):
            reduce = options["reduce_fx"]
            function = {"sum": sum, "min": min, "max": max}.get(str(reduce), reduce)
            with suppress(Exception):
                if _is_close(
                    float(function(torch.tensor(values) if callable(reduce) else values)), expected, tolerance
                ):
                    continue
            raise _Differs(f"the logged value {name!r} of all samples isn't the {reduce} of its parts'")
        fitting = [rule for rule in logged.get(name, made) if _gives(made[rule], values, expected, tolerance)]
        if not fitting:
            raise _Differs(f"the logged value {name!r} of all samples is no mean of its parts'")
        logged[name] = fitting


def _gives(weights: Sequence[float] | None, values: Sequence[float], expected: float, tolerance: float) -> bool:
    if weights is None:
        return False
    made = sum(weight * value for weight, value in zip(weights, values, strict=True) if weight)
    return _is_close(made, expected, tolerance)


def _is_close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= 10 * tolerance * max(abs(one), abs(other)) or (one != one and other != other)


def _fits(made: Sequence[float] | None, weights: Sequence[float | None], tolerance: float) -> bool:
    if made is None:
        return False
    return all(
        w is None or abs(w - own) <= tolerance * max(1.0, abs(own)) for w, own in zip(weights, made, strict=True)
    )


def _difference(one: Tensor, other: Tensor) -> float:
    """Relative to the larger."""
    if one.shape != other.shape:
        return float("inf")
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    one, other = one.double(), other.double()
    size = max(float(one.norm()), float(other.norm()))
    different = (one - other).masked_fill(one == other, 0.0)  # also of infinite ones
    return float(different.norm()) / size if size and size != float("inf") else float(bool(different.any()))


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(sum(float(one.double().square().sum()) for one in tensors) ** 0.5)


def _dot(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return sum(float((one.double() * other.double()).sum()) for one, other in zip(tensors, others, strict=True))


def own_copy(piece: Any) -> Any:
    """A copy of a micro-batch, which a dry run may change."""
    if type(piece) in (dict, list, tuple):
        return with_children(piece, {key: own_copy(value) for key, value in (children(piece) or {}).items()})
    return piece.clone() if isinstance(piece, Tensor) else deepcopy(piece)
