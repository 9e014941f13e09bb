"""Balances the stages: cuts the stack into stages of about equal cost."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_hanayo.errors import HanayoError


def cut(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> list[range]:
    """The indices of each stage's blocks, for contiguous stages, none empty, with the least maximum cost.

    Args:
        costs: one per block, in any unit (parameters, seconds).
        num_stages: at most the number of blocks.
        first, last: the cost of what the first and the last stage do besides their blocks, in the same unit.

    Raises:
        HanayoError: there are fewer blocks than stages.

    Example:
        >>> cut([1, 1, 1, 1, 1], 2, last=1.0)
        [range(0, 3), range(3, 5)]
    """
    if len(costs) < num_stages:
        raise HanayoError(f"{len(costs)} blocks can't fill {num_stages} stages")
    sums = [0.0, *accumulate(map(float, costs))]
    num_blocks = len(costs)
    best: list[_Cut | None] = [_Cut(), *[None] * num_blocks]  # best[i] cuts the first i blocks; None: impossible
    for stage in range(num_stages):
        extra = first * (stage == 0) + last * (stage == num_stages - 1)
        best = [_add_stage(best, sums, stop, extra) for stop in range(num_blocks + 1)]
    found = best[num_blocks]
    assert found is not None
    return [range(start, stop) for start, stop in pairwise((*found.starts, num_blocks))]


class _Cut(NamedTuple):
    """The stages so far. A lower maximum cost is better; of equal ones, the more even cut."""

    max_cost: float = 0.0
    sum_of_squares: float = 0.0
    starts: tuple[int, ...] = ()


def _add_stage(best: Sequence[_Cut | None], sums: Sequence[float], stop: int, extra: float) -> _Cut | None:
    """The best cut of the first `stop` blocks that has one more stage than those in `best`."""
    options = []
    for start, before in enumerate(best[:stop]):
        if before is not None:
            cost = sums[stop] - sums[start] + extra
            squares = before.sum_of_squares + cost * cost
            options.append(_Cut(max(before.max_cost, cost), squares, (*before.starts, start)))
    return min(options, default=None)
