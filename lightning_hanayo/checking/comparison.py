"""Compares the values that two runs have left, name by name, and lists what differs in the order of its making.

of each step    losses, gradients, weights, buffers, logged values
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["loss", "gradient", "weight", "buffer", "log"]
KINDS: tuple[Kind, ...] = ("loss", "gradient", "weight", "buffer", "log")


class Key(NamedTuple):
    """Names one value of a run."""

    step: int
    """the optimizer step, counted from 0"""
    kind: Kind
    name: str


Values = dict[Key, Tensor]
"""What a run has left, on the CPU."""


@dataclass(frozen=True)
class Tolerance:
    """What counts as equal: gaps of at most `relative[kind]`, measured against the larger of two sizes.

    These are the value's own largest element, and `floor` times the largest of its kind and step: a gradient that is
    zero but for rounding has no digits of its own.
    """

    relative: Mapping[Kind, float]
    floor: float


EXACT = Tolerance(dict.fromkeys(KINDS, 1e-9), 1e-3)
"""for fp64"""
ROUNDED = Tolerance({"loss": 1e-5, "gradient": 1e-4, "weight": 1e-3, "buffer": 1e-4, "log": 1e-5}, 1.0)
"""for fp32, also in places; the most for weights: Adam makes a whole step of a gradient that is zero up to rounding"""


@dataclass(frozen=True)
class Difference:
    """A value that isn't as expected."""

    key: Key
    gap: float
    """the largest distance of two elements, relative to the value's size; infinite where they can't be compared"""
    expected: float | None
    """the element that is farthest off; None: there is no such value"""
    actual: float | None
    note: str = ""
    data_rank: int = 0


@dataclass(frozen=True)
class Comparison:
    """All values of two runs compared."""

    largest: Mapping[Kind, float] = field(default_factory=dict)
    """the largest relative gap of each kind"""
    num_values: Mapping[Kind, int] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    """those beyond the tolerance, the first one first"""

    @property
    def is_exact(self) -> bool:
        """Whether every value is within the tolerance."""
        return not self.differences

    @property
    def gap(self) -> float:
        """The largest of all gaps."""
        return max(self.largest.values(), default=0.0)


def compare(expected: Values, actual: Sequence[Values], tolerance: Tolerance) -> Comparison:
    """Compare each data rank's values with the expected ones.

    Args:
        expected: of the reference.
        actual: one per data rank. The first has all; the others may lack what only one of them reports. Logged values
            may be more than expected: some aren't compared.
        tolerance: what counts as equal.

    Example:
        >>> key = Key(0, "loss", "batch 0")
        >>> compare({key: torch.tensor(1.0)}, [{key: torch.tensor(1.5)}], EXACT).gap
        0.5
    """
    sizes: dict[tuple[int, str], float] = {}  # the largest element of each step and kind
    for key, value in expected.items():
        sizes[key[:2]] = max(sizes.get(key[:2], 0.0), _largest(value))
    largest: dict[Kind, float] = {}
    counts: dict[Kind, int] = {}
    found = []
    for data_rank, values in enumerate(actual):
        for key in expected if data_rank == 0 else expected.keys() & values.keys():
            one = _difference(key, expected[key], values.get(key), sizes[key[:2]] * tolerance.floor, data_rank)
            largest[key.kind] = max(largest.get(key.kind, 0.0), one.gap)
            counts[key.kind] = counts.get(key.kind, 0) + (data_rank == 0)
            if not one.gap <= tolerance.relative[key.kind]:
                found.append(one)
        for key in values.keys() - expected.keys():
            if key.kind != "log":
                note = "one process has no such value"
                found.append(Difference(key, inf, None, _first(values[key]), note=note, data_rank=data_rank))
    positions = {key: i for i, key in enumerate(expected)}
    found.sort(key=lambda one: (one.key.step, KINDS.index(one.key.kind), positions.get(one.key, len(positions))))
    return Comparison(largest, counts, tuple(found))


def _largest(value: Tensor) -> float:
    numbers = _comparable(value)
    finite = numbers[numbers.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _difference(key: Key, expected: Tensor, actual: Tensor | None, floor: float, data_rank: int) -> Difference:
    if actual is None:
        if key.kind == "gradient" and not _largest(expected):
            return Difference(key, 0.0, 0.0, None, data_rank=data_rank)  # no gradient, or one that is zero
        return Difference(key, inf, _first(expected), None, note="the layout has no such value", data_rank=data_rank)
    if actual.shape != expected.shape:
        note = f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        return Difference(key, inf, _first(expected), _first(actual), note=note, data_rank=data_rank)
    if not expected.numel():
        return Difference(key, 0.0, None, None, data_rank=data_rank)
    wanted, got = _comparable(expected), _comparable(actual)
    gaps = torch.where((wanted == got) | (wanted.isnan() & got.isnan()), 0.0, (got - wanted).abs())
    gaps = gaps.nan_to_num(nan=inf, posinf=inf)
    place = int(gaps.argmax())
    size = max(_largest(wanted), floor)
    distance = float(gaps[place])
    gap = distance / size if size else (inf if distance else 0.0)
    return Difference(key, gap, float(wanted[place]), float(got[place]), data_rank=data_rank)


def _comparable(value: Tensor) -> Tensor:
    flat = value.detach().flatten()
    return torch.view_as_real(flat).flatten().double() if flat.is_complex() else flat.double()


def _first(value: Tensor) -> float | None:
    return float(_comparable(value)[0]) if value.numel() else None
