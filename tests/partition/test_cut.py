"""The cut gives ranks equal shares, as far as whole blocks allow it, and then stages.

12 equal blocks, 4 ranks, one wave:     2 2 2 2 1 1 1 1        each rank has 3
"""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.partition.cut import Load, cut, stage_shares


def wave(num_ranks: int, num_waves: int = 1) -> list[int]:
    return [*range(num_ranks), *reversed(range(num_ranks))] * num_waves


def fullest(loads: list[Load], ranks: list[int], stages: list[range]) -> float:
    """The largest share of a rank, of any load."""
    largest = 0.0
    for load in loads:
        shares = [0.0] * (max(ranks) + 1)
        shares[0] = load.outside
        for rank, stage in zip(ranks, stages, strict=True):
            shares[rank] += sum(load.blocks[i] for i in stage)
        largest = max(largest, max(shares) / ((sum(load.blocks) + load.outside) or 1.0))
    return largest


def all_cuts(count: int, num_stages: int) -> list[list[range]]:
    borders = ((0, *inner, count) for inner in combinations(range(1, count), num_stages - 1))
    return [[range(a, b) for a, b in pairwise(border)] for border in borders]


def found_and_best(loads: list[Load], ranks: list[int]) -> tuple[float, float]:
    count = len(loads[0].blocks)
    found = cut(loads, ranks)
    assert [i for run in found for i in run] == list(range(count)) and all(found)
    return fullest(loads, ranks, found), min(fullest(loads, ranks, each) for each in all_cuts(count, len(ranks)))


@given(some.integers(4, 12), some.sampled_from([1, 2]), some.integers(0, 12), some.integers(0, 6))
def test_of_equal_blocks_no_cut_is_better(count: int, waves: int, outside: int, tables: int) -> None:
    ranks = wave(2, waves) if count >= 4 * waves else wave(2)
    loads = [Load([1.0] * count, outside), Load([1.0] * count, outside + tables)]
    found, best = found_and_best(loads, ranks)
    assert found == pytest.approx(best)


@given(some.lists(some.integers(1, 20), min_size=4, max_size=9), some.integers(0, 30))
def test_of_other_blocks_few_cuts_are_better(costs: list[int], outside: int) -> None:
    found, best = found_and_best([Load(costs, outside)], wave(2))
    assert found <= best + max(costs) / (sum(costs) + outside)


@pytest.mark.parametrize(
    ("num_blocks", "ranks", "lengths"),
    [
        (8, wave(2), [2] * 4),
        (8, wave(2, 2), [1] * 8),
        (5, [0], [5]),
        (12, wave(4), [2, 2, 2, 2, 1, 1, 1, 1]),
        (6, [0, 1, 2, 3], [2, 2, 1, 1]),
    ],
)
def test_equal_blocks(num_blocks: int, ranks: list[int], lengths: list[int]) -> None:
    assert [len(run) for run in cut([Load([1.0] * num_blocks)], ranks)] == lengths


def test_the_rank_of_the_first_stage_has_the_code_outside_the_stack() -> None:
    assert [len(run) for run in cut([Load([1] * 8, outside=1000)], wave(2))] == [1, 3, 3, 1]
    assert cut([Load([1.0] * 8, outside=4.0)], [0, 1], outside_stage=0) == [range(2), range(2, 8)]
    assert [len(run) for run in cut([Load([1] * 14, outside=2.0)], wave(4))] == [1, 2, 2, 2, 2, 2, 2, 1]


def test_time_and_memory_count_both() -> None:
    """The code outside takes no time, but as much memory as three blocks."""
    time, memory = Load([1.0] * 9), Load([1.0] * 9, outside=3.0)
    assert [len(run) for run in cut([time], [0, 1, 2])] == [3, 3, 3]
    assert [len(run) for run in cut([time, memory], [0, 1, 2])] == [2, 4, 3]


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(HanayoError, match="3 blocks can't fill 4 stages"):
        cut([Load([1, 1, 1])], wave(2))


def test_shares_of_stages() -> None:
    stages = [range(2), range(2, 4)]
    assert stage_shares(Load([1.0] * 4), stages, -1) is None
    assert stage_shares(Load([1.0] * 4, outside=1.0), stages, -1) == (0.4, 0.6)
