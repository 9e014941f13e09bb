"""Balances the stages: cuts the stack so that pipeline ranks have about equal shares of it.

12 equal blocks, 4 ranks, one wave         2 2 2 2 1 1 1 1          rank 0 has stages 0 and 7: 2 + 1 blocks
with code outside the stack worth 1        1 2 2 2 2 1 1 1          rank 0 has 1 + 1, and that code

A step can't be faster than the rank with most to compute, and the rank with most parameters needs most memory. So the
shares of ranks count first; then equal stages, as a stage that takes long holds up those behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_hanayo.errors import HanayoError

_EVEN = 0.1
"""by how much of their mean stages may differ where they count as equal"""


@dataclass(frozen=True)
class Load:
    """A load that is to be shared evenly, in any unit.

    Args:
        blocks: of each block.
        outside: of the code outside the stack, on the rank of the first stage.
    """

    blocks: Sequence[float]
    outside: float = 0.0


def cut(loads: Sequence[Load], stage_ranks: Sequence[int], *, outside_stage: int = -1) -> list[range]:
    """The indices of each stage's blocks, for contiguous stages, none empty.

    It makes the largest share of a rank small, of all loads in turn; then ranks even, then stages, larger ones first.
    It improves one cut by moving single blocks between stages until none of these moves is better: for equal blocks
    the result is the best, else nearly so.

    Args:
        loads: one or several: time, memory.
        stage_ranks: the rank of each stage; at most as many stages as there are blocks.
        outside_stage: the stage that is as long as its blocks and the code outside the stack together.

    Raises:
        HanayoError: there are fewer blocks than stages.

    Example:
        >>> cut([Load([1] * 5, outside=1)], [0, 1, 1, 0])
        [range(0, 1), range(1, 2), range(2, 4), range(4, 5)]
    """
    num_blocks, num_stages = len(loads[0].blocks), len(stage_ranks)
    if num_blocks < num_stages:
        raise HanayoError(f"{num_blocks} blocks can't fill {num_stages} stages")
    rule = _Rule(loads, stage_ranks, outside_stage % num_stages)
    borders = rule.first_borders()
    best = rule.key(borders)
    improves = True
    while improves:
        improves = False
        for giver in range(num_stages):
            for taker in range(num_stages):
                while borders[giver + 1] - borders[giver] > 1 and giver != taker:
                    # one stage has a block less and another one more: those in between hand one on
                    low, high = min(giver, taker), max(giver, taker)
                    step = -1 if giver < taker else 1
                    moved = [border + step * (low < i <= high) for i, border in enumerate(borders)]
                    if (key := rule.key(moved)) >= best:
                        break
                    borders, best, improves = moved, key, True
    return [range(start, stop) for start, stop in pairwise(borders)]


def stage_shares(load: Load, stages: Sequence[range], outside_stage: int) -> tuple[float, ...] | None:
    """Each stage's share of the load, the code outside the stack included; None if all are about equal."""
    lengths = [sum(load.blocks[i] for i in stage) for stage in stages]
    lengths[outside_stage] += load.outside
    total = sum(lengths)
    if not total or all(abs(length * len(stages) / total - 1) < _EVEN for length in lengths):
        return None
    return tuple(length / total for length in lengths)


class _Rule:
    """Compares cuts, given by the borders of their stages: 0, ..., the number of blocks."""

    def __init__(self, loads: Sequence[Load], stage_ranks: Sequence[int], outside_stage: int) -> None:
        self._ranks = stage_ranks
        self._outside_stage = outside_stage
        self._num_ranks = max(stage_ranks) + 1
        self._sums, self._outside = [], []
        for load in loads:
            mean = (sum(load.blocks) + load.outside) / self._num_ranks or 1.0
            self._sums.append([0.0, *accumulate(float(one) / mean for one in load.blocks)])
            self._outside.append(load.outside / mean)

    def first_borders(self) -> list[int]:
        """A cut to begin with: ranks and their stages as equal as the code outside the stack lets them be."""
        sums, num_stages = self._sums[0], len(self._ranks)
        own = self._ranks[0]
        per_rank = [self._ranks.count(rank) for rank in range(self._num_ranks)]
        smallest = sums[-1] / (len(sums) - 1) * per_rank[own]  # one block in each of its stages
        share = max(smallest, 1.0 - self._outside[0])
        rest = (sums[-1] - share) / max(1, self._num_ranks - 1)
        wanted = accumulate((share if rank == own else rest) / per_rank[rank] for rank in self._ranks)
        borders = [0]
        for stage, position in enumerate(wanted):
            low, high = borders[-1] + 1, len(sums) - num_stages + stage
            borders.append(min(range(low, high + 1), key=lambda i: abs(sums[i] - position)))
        return [*borders[:-1], len(sums) - 1]

    def key(self, borders: Sequence[int]) -> tuple[float, ...]:
        """Smaller for a better cut."""
        largest = squares = 0.0
        for sums, outside in zip(self._sums, self._outside, strict=True):
            shares = [0.0] * self._num_ranks
            shares[self._ranks[0]] = outside
            for rank, (start, stop) in zip(self._ranks, pairwise(borders), strict=True):
                shares[rank] += sums[stop] - sums[start]
            largest = max(largest, *shares)
            squares += sum(share * share for share in shares)
        sums = self._sums[0]
        stages = [sums[stop] - sums[start] for start, stop in pairwise(borders)]
        position = sum(stage * length for stage, length in enumerate(stages))
        stages[self._outside_stage] += self._outside[0]
        evenness = sum(length * length for length in stages)
        return tuple(round(one, 9) for one in (largest, squares, max(stages), evenness, position))
