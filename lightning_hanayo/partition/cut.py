"""The cut: how many blocks each stage gets, so that the costliest stage has as little to do as possible."""

from collections.abc import Sequence
from itertools import accumulate

from lightning_hanayo.errors import HanayoError


def cut(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Cut blocks of `costs` into `num_stages` runs, none empty; the costliest stage as cheap as can be.

    Args:
        costs: one per block, in any unit (parameters, seconds).
        num_stages: at most as many as blocks.
        first, last: what the first and the last stage have to do besides their blocks, in the same unit.

    Returns:
        The blocks of each stage.

    Raises:
        HanayoError: there are fewer blocks than stages.

    Example:
        >>> cut([1, 1, 1, 1, 1], 2, last=1.0)
        [range(0, 3), range(3, 5)]
    """
    if len(costs) < num_stages:
        raise HanayoError(f"{len(costs)} blocks can't fill {num_stages} stages")
    sums = [0.0, *accumulate(map(float, costs))]
    count = len(costs)
    # best[i]: (the costliest of the stages so far, squares for even ties, where they begin), over the first i blocks
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ()), *[None] * count]
    for stage in range(num_stages):
        extra = first * (stage == 0) + last * (stage == num_stages - 1)
        best = [_extend(best, sums, stop, extra) for stop in range(count + 1)]
    found = best[count]
    assert found is not None
    starts = [*found[2], count]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def _extend(
    best: Sequence[tuple[float, float, tuple[int, ...]] | None], sums: Sequence[float], stop: int, extra: float
) -> tuple[float, float, tuple[int, ...]] | None:
    """The best way to end one more stage before block `stop`."""
    options = []
    for start in range(stop):
        before = best[start]
        if before is not None:
            cost = sums[stop] - sums[start] + extra
            options.append((max(before[0], cost), before[1] + cost * cost, (*before[2], start)))
    return min(options, default=None)
