"""Compares one dry run of some samples with dry runs of their parts: gradients, arguments of blocks, logged values.

Rules by which the losses of micro-batches are weighed: what each of them counts, read off the batch.

labels          [7, 3, -100, -100]   [2, 2, 9, -100]
"samples"        1                    1
not -100         2                    3
not -100 ->      1                    2       shifted: the first label of each sequence predicts nothing
sum of mask      ...
1 each           1                    1       losses are sums: nothing is divided
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path
from torchmetrics import Metric

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchRule
from lightning_hanayo.pipeline_parallel.batches.reader import named_arrays
from lightning_hanayo.pipeline_parallel.capture.dry_step import Ran
from lightning_hanayo.pipeline_parallel.capture.whole_step import grown_dim, tensors_of_calls
from lightning_hanayo.strategy.lightning.metrics import RecordedLogs

IGNORED_LABEL = -100
MANY_CLASSES = 64
"""with more values, those of a label for each sample aren't tried one by one"""
CLOSE = 1e-6
"""weights that differ by less are the same"""

Named = Mapping[str, Tensor]
"""the tensors of a piece, by where they are"""


@dataclass(frozen=True)
class Rule:
    """What a piece of a batch counts.

    Args:
        kind: samples; 1 for each piece; labels in a tensor other than `ignored`; the sum of a tensor; or what the user
            has named.
        path: of the tensor.
        ignored: the value of labels that don't count.
        is_shifted: whether the first of each sequence doesn't count.
    """

    kind: Literal["samples", "each", "labels", "sum", "named"]
    path: str = ""
    ignored: int = IGNORED_LABEL
    is_shifted: bool = False

    def __str__(self) -> str:
        shifted = ", without the first of each sequence" * self.is_shifted
        texts = {
            "samples": "samples",
            "each": "nothing: the losses are added up",
            "labels": f"the values of {self.path} other than {self.ignored}{shifted}",
        }
        return texts.get(self.kind, f"the sum of {self.path}{shifted}")

    @property
    def is_token(self) -> bool:
        """Whether it leaves out one value of labels, which may stand for padding."""
        return self.kind == "labels" and self.ignored != IGNORED_LABEL

    def counts(self, pieces: Sequence[Named], sizes: Sequence[int]) -> list[float] | None:
        """What each piece counts; None if a piece has no such tensor."""
        if self.kind == "samples":
            return list(map(float, sizes))
        if self.kind == "each":
            return [1.0] * len(sizes)
        found = [piece.get(self.path) for piece in pieces]
        if any(one is None for one in found):
            return None
        counted = [self._count(one) for one in found if one is not None]
        return [float(one) for one in torch.stack(counted).tolist()]

    def weights(self, pieces: Sequence[Named], sizes: Sequence[int]) -> list[float] | None:
        """The weight of each piece's loss; None if there is none."""
        counts = self.counts(pieces, sizes)
        if counts is None or self.kind == "each":
            return counts
        total = sum(counts)
        return [n / total for n in counts] if total else None

    def _count(self, tensor: Tensor) -> Tensor:
        if self.is_shifted:
            tensor = tensor[..., 1:]
        return (tensor != self.ignored).sum().double() if self.kind == "labels" else tensor.sum(dtype=torch.float64)


SAMPLES, EACH, NAMED = Rule("samples"), Rule("each"), Rule("named")


class Weighed:
    """The pieces of a batch, and their weights by each rule, which are computed once.

    Args:
        pieces: the tensors of each.
        sizes: the samples of each.
    """

    def __init__(self, pieces: Sequence[Named], sizes: Sequence[int]) -> None:
        self._pieces, self._sizes = pieces, sizes
        self._made: dict[Rule, list[float] | None] = {}

    @cached_property
    def possible(self) -> tuple[Rule, ...]:
        """All rules that they tell of."""
        return tuple(possible_rules(self._pieces))

    def by(self, rule: Rule) -> list[float] | None:
        """Their weights by a rule; None if there are none."""
        if rule not in self._made:
            self._made[rule] = rule.weights(self._pieces, self._sizes)
        return self._made[rule]


def named_tensors(piece: Any) -> Named:
    """The tensors of a piece, by where they are."""
    return {path: one for path, one, _ in named_arrays(piece, BatchRule(), "batch") if isinstance(one, Tensor)}


def possible_rules(pieces: Sequence[Named]) -> Iterator[Rule]:
    """All rules that these pieces of a batch tell of: those for labels first, then sums of masks and weights.

    A value that may stand for padding is -100, one that ends or begins a sequence several times, or a class.
    """
    yield from (SAMPLES, EACH)
    paths = [path for path in pieces[0] if all(path in piece and piece[path].ndim for piece in pieces)]
    for path in paths:
        tensors = [piece[path] for piece in pieces]
        if tensors[0].is_floating_point() or tensors[0].is_complex() or tensors[0].dtype == torch.bool:
            continue
        for value in sorted({IGNORED_LABEL}.union(*map(_possibly_ignored, tensors))):
            yield from (Rule("labels", path, value, shifted) for shifted in (False, True)[: tensors[0].ndim])
    for path in paths:
        if not pieces[0][path].is_complex():
            yield from (Rule("sum", path, 0, shifted) for shifted in (False, True)[: pieces[0][path].ndim])


def _possibly_ignored(tensor: Tensor) -> set[int]:
    if tensor.ndim == 1:
        values = tensor.unique()
        return set(values.tolist()) if len(values) <= MANY_CLASSES else set()
    if tensor.shape[-1] < 2:
        return set()
    ends = [tensor[..., i][tensor[..., i] == tensor[..., j]] for i, j in ((0, 1), (-1, -2))]
    return set(torch.cat(ends).unique().tolist())


def are_close(weights: Sequence[float] | None, others: Sequence[float | None], tolerance: float = CLOSE) -> bool:
    """Whether there are weights, and they are the same as the others; None: one that isn't known."""
    return weights is not None and all(
        b is None or abs(a - b) <= tolerance * max(1.0, abs(a)) for a, b in zip(weights, others, strict=True)
    )


Weights = Mapping[Rule, Sequence[float] | None]
"""of parts in their common loss, by each rule; None: a rule gives none"""
NOISE = 0.1
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that arithmetic explains: of gradients, of their proportion, and of logged values."""

    residual: float = 1e-5
    weight: float = 1e-5
    value: float = 1e-4


EXACT, ROUGH = Tolerance(), Tolerance(3e-2, 4e-3, 1e-2)


_OTHER_ROWS = "tensors in front of the stack or behind it don't have the same number of rows for each sample"


class Differs(Exception):
    """Steps of parts don't add up."""


class Unknown(Exception):
    """It can't be told."""


class CannotBeCut(Unknown):
    """It can't, as the blocks' arguments of all samples can't be cut into those of parts."""


@dataclass
class DryRun:
    """A dry run of some samples: what it has shown, and its gradients."""

    ran: Ran
    gradients: list[Tensor]
    """at the outputs of the stack"""
    outside: dict[str, Tensor]
    """at parameters outside: some elements"""
    logs: RecordedLogs
    is_random: bool


class Outputs:
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
        self._by_view: set[int] = set()
        """the tensors that have one view of all samples after the other, and not all views of a sample together"""
        self.gaps: dict[int, float] = {}
        """by part: how much its first block's output differs from that of the same samples among all"""

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
            first = [self.part(self._first[start + i], start + i, number, one) for i, one in enumerate(made)]
            self.gaps[number] = max([self.gaps.get(number, 0.0) if start else 0.0, *map(_difference, first, made)])
            return [self.part(self.union[start + i], start + i, number) for i in range(len(made))]

        return given

    def part(self, whole: Tensor, index: int, number: int, like: Tensor | None = None) -> Tensor:
        """A part of a tensor that is as large as the whole output."""
        total = sum(self._sizes)
        share = sum(self._sizes[:number]), self._sizes[number], total
        if like is not None and index not in self.dims:
            dim = self.dims[index] = grown_dim(whole, like, self._sizes[number] / total)
            if dim is not None:
                if whole.shape[dim] % total:
                    raise Unknown(_OTHER_ROWS)
                _, by_view = min((_difference(_rows(whole, dim, share, by), like), by) for by in (False, True))
                self._by_view |= {index} if by_view else set()
        dim = self.dims.get(index)
        return whole if dim is None else _rows(whole, dim, share, index in self._by_view)

    def _drawn(self, index: int) -> Tensor:
        one, dim = self._first[index], self.dims.get(index)
        if not one.is_floating_point():
            return one
        if dim is not None and one.shape[dim] % sum(self._sizes) == 0:
            total, by_view = sum(self._sizes), index in self._by_view
            rows = torch.arange(one.shape[dim])
            rows = rows.view(-1, total).T if by_view else rows.view(total, -1)  # [samples, views]
            rows = rows[torch.randperm(total, generator=self._generator)]
            one = one.index_select(dim, (rows.T if by_view else rows).flatten().to(one.device))
        return one + NOISE * one.std() * torch.randn(one.shape, generator=self._generator).to(one)


def shown(weights: Sequence[float | None], sizes: Sequence[int]) -> str:
    """The weights that gradients tell of, in words."""
    numbers = ", ".join("?" if one is None else f"{one:.4g}" for one in weights[:8])
    return f"the losses of {', '.join(map(str, sizes[:8]))} samples have the weights {numbers} in their common loss"


def weights_of(whole: DryRun, parts: Sequence[DryRun], outputs: Outputs, tolerance: Tolerance) -> list[float | None]:
    """The weight of each part's loss in the loss of all; None: no gradient tells.

    Raises:
        Differs: there is none.
    """
    indices = [i for i, one in enumerate(whole.ran.tensors) if one.requires_grad]
    weights: list[float | None] = []
    size = _norm(whole.gradients)
    for number, part in enumerate(parts):
        expected = [outputs.part(g, i, number) for g, i in zip(whole.gradients, indices, strict=True)]
        given = part.gradients
        if len(given) != len(expected):
            raise Differs("the passes through the stack differ")
        if any(bool(one.isnan().any()) for one in given):
            if _norm(expected):
                raise Differs("the loss of some samples alone is NaN, and that of all isn't")
            weights.append(0.0)
            continue
        square = _dot(given, given)
        if not square:
            if _norm(expected) > tolerance.residual * size:
                raise Differs("the gradient at the stack's output is 0 for some samples alone, and isn't with others")
            weights.append(None)
            continue
        weight = _dot(expected, given) / square
        rest = [one - weight * other for one, other in zip(expected, given, strict=True)]
        share = _norm(rest) / max(size, 1e-300)
        if not share <= tolerance.residual:
            raise Differs(f"the gradient at the stack's output differs by {share:.2g}, whatever the weights")
        weights.append(weight)
    return weights


def check_arguments(
    whole: DryRun, parts: Sequence[DryRun], sizes: Sequence[int], gaps: Mapping[int, float], tolerance: Tolerance
) -> bool:
    """Check that blocks get the same from the steps of parts; where that can't be compared, that they make the same.

    Returns:
        Whether all arguments can be cut into those of parts.

    Raises:
        Differs: they get, or make, something else.
        CannotBeCut: it isn't known, as there are no `gaps` of the first block's output.
    """
    total, starts, can_be_cut = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))], True
    for number, part in enumerate(parts):
        if len(part.ran.calls) != len(whole.ran.calls):
            raise Differs("the passes through the stack differ")
        makes_the_same = gaps.get(number, 0.0) <= tolerance.residual
        for i, (call, own) in enumerate(zip(whole.ran.calls, part.ran.calls, strict=True)):
            of_part = dict(tensors_of_calls(own, first=i % 2 == 0))
            for path, tensor in tensors_of_calls(call, first=i % 2 == 0):
                if path not in of_part:  # a mask that masks nothing, if the block attends likewise without it
                    if not makes_the_same:
                        raise Differs(f"blocks get an argument {tuple(tensor.shape)} with other samples alone")
                    continue
                found = of_part[path].detach()
                try:
                    dim = grown_dim(tensor, found, sizes[number] / total)
                except UnsupportedError as error:  # samples in one sequence, say
                    if number not in gaps or not makes_the_same:
                        raise CannotBeCut(
                            f"an argument of the blocks {tuple(tensor.shape)} has no dimension of the samples"
                        ) from error
                    can_be_cut = False
                    continue
                if dim is not None and tensor.shape[dim] % total:
                    if tolerance.residual < float("inf"):
                        raise Unknown(_OTHER_ROWS)
                    continue
                own_rows = starts[number], sizes[number], total
                expected = [tensor] if dim is None else [_rows(tensor, dim, own_rows, by) for by in (False, True)]
                share = min(_difference(one.detach(), found) for one in expected)
                if share > tolerance.residual:
                    raise Differs(f"an argument of the blocks {tuple(tensor.shape)} differs by {share:.2g}")
    return can_be_cut


def check_outside(
    whole: DryRun, parts: Sequence[DryRun], weights: Sequence[float | None], tolerance: Tolerance
) -> None:
    """Check that the gradients of parameters outside the stack add up.

    Raises:
        Differs: they don't.
    """
    for name, share in _differences_outside(whole, parts, weights):
        if share > 10 * tolerance.residual and all(weight is not None for weight in weights):
            raise Differs(f"the gradient of {name} differs by {share:.2g}")


def adds_up(
    whole: DryRun, parts: Sequence[DryRun], weights: Sequence[float] | None, noise: Mapping[str, float]
) -> bool:
    """Whether the gradients of all parameters add up with these weights. `noise`: what rounding alone changes."""
    if weights is None:
        return False
    most = {name: min(max(ROUGH.residual, 4 * one), 10 * ROUGH.residual) for name, one in noise.items()}
    differences = _differences_outside(whole, parts, weights)
    return all(share <= most.get(name, 10 * EXACT.residual) for name, share in differences)


def rounding(whole: DryRun, scaled: DryRun) -> dict[str, float]:
    """By how much gradients of all parameters differ from those of the same samples, rounded otherwise."""
    return dict(_differences_outside(whole, [scaled], [1.0]))


def _differences_outside(
    whole: DryRun, parts: Sequence[DryRun], weights: Sequence[float | None]
) -> Iterator[tuple[str, float]]:
    """By how much each parameter's gradient differs, as a share of it; or of a hundredth of the largest one's norm.

    Some are 0 but for rounding, such as that of a bias in front of a softmax.
    """
    least = 0.01 * max((float(expected.norm()) for expected in whole.outside.values()), default=0.0)
    for name, expected in whole.outside.items():
        added = torch.zeros_like(expected)
        for part, weight in zip(parts, weights, strict=True):
            if weight and name in part.outside:
                added += weight * part.outside[name]
        yield name, _difference(expected, added, least)


def check_logged(
    whole: DryRun, parts: Sequence[DryRun], made: Weights, logged: dict[str, list[Rule]], tolerance: float
) -> None:
    """Keep those rules by which logged and returned values of parts make those of all.

    Raises:
        Differs: a value has none.
    """
    if whole.logs.calls_logger:
        raise Differs("the step calls log_metrics of a logger")
    of_all, of_parts = whole.logs.logged, [part.logs.logged for part in parts]
    missing = [name for name, _ in of_all.keys() ^ {key for own in of_parts for key in own}]
    some = [name for own in of_parts for name, _ in of_all.keys() - own.keys()]
    if missing or some:
        raise Differs(f"the value {(missing or some)[0]!r} is logged for some samples alone")
    for key, (value, options) in of_all.items():
        name, _ = key
        if isinstance(value, Metric):
            continue
        values = [float(own[key][0]) for own in of_parts]
        expected = float(value)
        if str(options.get("reduce_fx", "mean")) not in ("mean", "avg"):
            reduce = options["reduce_fx"]
            function = {"sum": sum, "min": min, "max": max}.get(str(reduce), reduce)
            with suppress(Exception):
                if _is_close(
                    float(function(torch.tensor(values) if callable(reduce) else values)), expected, tolerance
                ):
                    continue
            raise Differs(f"the logged value {name!r} of all samples isn't the {reduce} of its parts'")
        fitting = [rule for rule in logged.get(name, made) if _gives(made[rule], values, expected, tolerance)]
        if not fitting:
            raise Differs(f"the logged value {name!r} of all samples is no mean of its parts'")
        logged[name] = fitting


def rules_of_returned(whole: DryRun, parts: Sequence[DryRun], made: Weights, tolerance: float) -> list[Rule]:
    """The rules by which all numbers that steps of parts return make those of all; samples, if they return none.

    Raises:
        Differs: there is none.
    """
    first, *rows = [_numbers(run.ran.result) for run in (whole, *parts)]
    fitting, names = list(made), [name for name in first if all(name in row for row in rows)]
    for name in names:
        fitting = [one for one in fitting if _gives(made[one], [row[name] for row in rows], first[name], tolerance)]
        if not fitting:
            raise Differs(f"no rule makes the returned value{name} of all samples, and those before it, of its parts'")
    return fitting if names else [SAMPLES]


def _numbers(result: Any) -> dict[str, float]:
    """The numbers that a step returns, by where they are."""
    found = tree_flatten_with_path(result)[0]
    return {
        keystr(path): float(value)
        for path, value in found
        if isinstance(value, float) or (isinstance(value, Tensor) and not value.ndim and value.is_floating_point())
    }


def _gives(weights: Sequence[float] | None, values: Sequence[float], expected: float, tolerance: float) -> bool:
    if weights is None:
        return False
    made = sum(weight * value for weight, value in zip(weights, values, strict=True) if weight)
    return _is_close(made, expected, tolerance)


def _is_close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other)) or (one != one and other != other)


def _difference(one: Tensor, other: Tensor, least: float = 0.0) -> float:
    """Relative to the larger one, or to `least`."""
    if one.shape != other.shape:
        return float("inf")
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    one, other = one.double(), other.double()
    size = max(float(one.norm()), float(other.norm()), least)
    different = (one - other).masked_fill(one == other, 0.0)  # also of infinite ones
    return float(different.norm()) / size if size and size != float("inf") else float(bool(different.any()))


def _rows(whole: Tensor, dim: int, share: tuple[int, int, int], by_view: bool) -> Tensor:
    """The rows of some samples: the first one's number, how many they are, and the number of all.

    `by_view`: one view of all samples comes after the other.
    """
    start, size, total = share
    each = whole.shape[dim] // total
    if by_view:
        views: Tensor = whole.unflatten(dim, (each, total))
        return views.narrow(dim + 1, start, size).flatten(dim, dim + 1)
    return whole.narrow(dim, start * each, size * each)


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(sum(float(one.double().square().sum()) for one in tensors) ** 0.5)


def _dot(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return sum(float((one.double() * other.double()).sum()) for one, other in zip(tensors, others, strict=True))
