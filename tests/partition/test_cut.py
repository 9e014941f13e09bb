"""The cut has the lowest possible maximum cost of a stage.

costs 1 1 1 1 1, last stage + 1:   | 1 1 1 | 1 1 +1 |
"""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.partition.cut import cut


def cost(costs: list[int], stages: list[range], last: int) -> int:
    return max(sum(costs[i] for i in run) + (last if run is stages[-1] else 0) for run in stages)


def all_cuts(count: int, num_stages: int) -> list[list[range]]:
    borders = ((0, *inner, count) for inner in combinations(range(1, count), num_stages - 1))
    return [[range(a, b) for a, b in pairwise(border)] for border in borders]


@given(some.lists(some.integers(0, 20), min_size=1, max_size=8), some.data(), some.integers(0, 30))
def test_no_cut_is_better(costs: list[int], data: some.DataObject, last: int) -> None:
    num_stages = data.draw(some.integers(1, len(costs)))
    found = cut(costs, num_stages, last=last)
    assert [i for run in found for i in run] == list(range(len(costs))) and all(found)
    assert cost(costs, found, last) == min(cost(costs, each, last) for each in all_cuts(len(costs), num_stages))


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "lengths"), [(8, 4, [2, 2, 2, 2]), (8, 8, [1] * 8), (5, 1, [5]), (12, 8, None)]
)
def test_equal_blocks_are_cut_evenly(num_blocks: int, num_stages: int, lengths: list[int] | None) -> None:
    found = [len(run) for run in cut([1.0] * num_blocks, num_stages)]
    assert found == lengths if lengths else sorted(found) == [1] * 4 + [2] * 4


def test_with_a_huge_head_the_last_stage_has_one_block() -> None:
    assert [len(run) for run in cut([1] * 8, 4, last=1000)][-1] == 1


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(HanayoError, match="3 blocks can't fill 4 stages"):
        cut([1, 1, 1], 4)


def test_costs_outside_the_stack_count_for_the_first_and_last_stage() -> None:
    assert cut([1.0] * 8, 2, last=4.0) == [range(6), range(6, 8)]
    assert cut([1.0] * 8, 2, first=4.0) == [range(2), range(2, 8)]
