"""Says which entries of a whole tensor a part holds, as runs of indices along each dimension.

A fused q, k, v [6, 4] with two heads, of which two ranks hold one each. Their parts are [3, 4]:

    row   0   1   2   3   4   5
         q0  q1  k0  k1  v0  v1
    rank  0   1   0   1   0   1          rank 0's region: rows (0, 1), (2, 3), (4, 5), columns (0, 4)
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

Runs = tuple[tuple[int, int], ...]
"""half-open runs of indices along one dimension, in the order in which a part stores them"""


@dataclass(frozen=True)
class Region:
    """Which entries of a whole tensor a part holds: every combination of one index of each dimension.

    Args:
        runs: of each dimension; () for a scalar.

    Example:
        >>> Region.of_entries([[0, 2, 4], [0, 1, 2, 3]])
        Region(runs=(((0, 1), (2, 3), (4, 5)), ((0, 4),)))
    """

    runs: tuple[Runs, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> "Region":
        """Returns the region of all entries of a tensor of this shape."""
        return Region(tuple(((0, size),) if size else () for size in shape))

    @staticmethod
    def of_entries(entries: Iterable[Sequence[int]]) -> "Region":
        """Returns the region with these indices along each dimension, which may also be 1-D arrays or tensors."""
        return Region(tuple(_runs(np.asarray(indices, dtype=np.int64)) for indices in entries))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The part's shape."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @cached_property
    def num_entries(self) -> int:
        """How many entries the part holds."""
        return math.prod(self.shape)

    def narrow(self, dim: int, start: int, stop: int) -> "Region":
        """Returns the region of a part of this part: of what it stores from `start` to `stop` along a dimension."""
        runs, position = [], 0
        for first, last in self.runs[dim]:
            low, high = max(start, position), min(stop, position + last - first)
            if low < high:
                runs.append((first + low - position, first + high - position))
            position += last - first
        return Region((*self.runs[:dim], tuple(runs), *self.runs[dim + 1 :]))

    def overlap(self, wanted: "Region") -> tuple[tuple["Overlap", ...], ...] | None:
        """Returns what this part and a `wanted` region have in common along each dimension; None if nothing.

        To copy it, copy every combination of one overlap of each dimension.
        """
        common = tuple(_overlaps(own, other) for own, other in zip(self.runs, wanted.runs, strict=True))
        return common if all(common) else None


class Overlap(NamedTuple):
    """Indices along one dimension that two parts have in common, and that both store one after another."""

    source: int
    """where they start in the part that is read"""
    target: int
    """where they start in the part that is wanted"""
    length: int


def partition_problem(shape: Sequence[int], regions: Sequence[Region]) -> str | None:
    """Returns what is wrong with regions that should make up a whole tensor; None if nothing.

    They must divide each dimension in one way, and there must be one region for each combination. So no entry is
    missing, and none is there twice. Regions without entries don't count.
    """
    if any(len(region.runs) != len(shape) for region in regions):
        return f"a part doesn't have {len(shape)} dimensions"
    regions = [region for region in regions if region.num_entries]
    if not math.prod(shape) and not regions:
        return None
    for dim, size in enumerate(shape):
        problem = _division_problem(size, {region.runs[dim] for region in regions})
        if problem:
            return f"{problem} along dimension {dim} of size {size}"
    twice = [region for region, count in Counter(regions).items() if count > 1]
    if twice:
        return "two parts overlap"
    expected = math.prod(len({region.runs[dim] for region in regions}) for dim in range(len(shape)))
    return None if len(regions) == expected else f"{len(regions)} of {expected} parts are there"


def _division_problem(size: int, divided: Iterable[Runs]) -> str | None:
    """What is wrong with runs that should hold each index of a dimension once."""
    position = 0
    for start, stop in sorted(run for runs in divided for run in runs):
        if not start < stop <= size:
            return f"the entries {start} to {stop} can't be"
        if start != position:
            return f"entries are missing from {position} on" if start > position else f"parts overlap at {start}"
        position = stop
    return None if position == size else f"entries are missing from {position} on"


def _runs(indices: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Runs:
    if not len(indices):
        return ()
    breaks = np.flatnonzero(np.diff(indices) != 1)
    starts = indices[[0, *(breaks + 1)]].tolist()
    last = indices[[*breaks, -1]].tolist()
    return tuple((start, stop + 1) for start, stop in zip(starts, last, strict=True))


def _overlaps(own: Runs, wanted: Runs) -> tuple[Overlap, ...]:
    """The overlaps of two lists of runs, in the order of the wanted ones."""
    found = []
    sources, targets = _located(own), _located(wanted)
    i = j = 0
    while i < len(sources) and j < len(targets):
        (start, stop, source), (first, last, target) = sources[i], targets[j]
        low, high = max(start, first), min(stop, last)
        if low < high:
            found.append(Overlap(source + low - start, target + low - first, high - low))
        if stop <= last:
            i += 1
        else:
            j += 1
    return tuple(sorted(found, key=lambda overlap: overlap.target))


def _located(runs: Runs) -> list[tuple[int, int, int]]:
    """Each run with its position in the part that stores it, sorted by index."""
    located, position = [], 0
    for start, stop in runs:
        located.append((start, stop, position))
        position += stop - start
    return sorted(located)
