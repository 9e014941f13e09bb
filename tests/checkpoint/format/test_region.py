"""Regions are index arrays, written as runs: whatever is done with them equals the same with the arrays."""

import random
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.dist_checkpointing.region import Region, partition_problem

FUSED = [[0, 2, 4], [0, 1, 2, 3]]
"""the rows of the first of two heads in a fused q, k, v [6, 4]"""


def entries(size: int) -> st.SearchStrategy[list[int]]:
    """Some indices of a dimension, in any order."""
    return st.lists(st.integers(0, size - 1), unique=True, max_size=size)


def indices(region: Region) -> list[list[int]]:
    return [[i for start, stop in runs for i in range(start, stop)] for runs in region.runs]


def test_runs_are_drawn_as_in_the_module() -> None:
    region = Region.of_entries(FUSED)
    assert region == Region((((0, 1), (2, 3), (4, 5)), ((0, 4),)))
    assert region.shape == (3, 4)
    assert Region.of_entries([torch.arange(6), range(4)]) == Region.whole([6, 4])


def test_a_scalar_and_no_entries_have_regions() -> None:
    assert Region.of_entries([]) == Region.whole([]) == Region(())
    assert Region.whole([]).num_entries == 1
    assert Region.of_entries([[], [0]]).shape == Region.whole([0, 1]).shape == (0, 1)


@given(entries(9))
def test_runs_keep_entries_and_their_order(one: list[int]) -> None:
    region = Region.of_entries([one])
    assert indices(region) == [one]
    assert len(region.runs[0]) == sum(before + 1 != after for before, after in zip([-9, *one], one, strict=False))


@given(st.tuples(entries(7), entries(5)), st.tuples(entries(7), entries(5)))
def test_an_overlap_says_where_both_have_an_entry(own: tuple[list[int], ...], wanted: tuple[list[int], ...]) -> None:
    common = Region.of_entries(own).overlap(Region.of_entries(wanted))
    expected = [{(a.index(i), b.index(i)) for i in set(a) & set(b)} for a, b in zip(own, wanted, strict=True)]
    if common is None:
        assert not all(expected)
    else:
        pairs = [[(s + i, t + i) for s, t, length in pieces for i in range(length)] for pieces in common]
        assert [set(one) for one in pairs] == expected
        assert [len(one) for one in pairs] == [len(one) for one in expected]


@given(st.lists(entries(6), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_parts_of_all_combinations_make_up_a_tensor(firsts: list[list[int]], choice: random.Random) -> None:
    """Each dimension is divided into two sets of indices; any part that is left out is missed."""
    divided = [[one, [i for i in range(6) if i not in one]] for one in firsts]
    parts = [Region.of_entries(combination) for combination in product(*divided)]
    shape = [6] * len(firsts)
    assert partition_problem(shape, parts) is None
    left_out = choice.choice([part for part in parts if part.num_entries])
    assert partition_problem(shape, [part for part in parts if part is not left_out]) is not None
    assert partition_problem(shape, [*parts, left_out]) is not None


@pytest.mark.parametrize(
    ("shape", "regions", "problem"),
    [
        ([4], [[range(2)]], "entries are missing from 2 on along dimension 0 of size 4"),
        ([4], [[range(1, 4)]], "entries are missing from 0 on"),
        ([4], [[range(3)], [range(2, 4)]], "parts overlap at 2"),
        ([4], [[range(5)]], r"the entries 0 to 5 can't be"),
        ([4], [[range(4)], [range(4)]], "two parts overlap"),
        ([2, 2], [[[0], [0]], [[1], [1]]], "2 of 4 parts are there"),
        ([4], [], "entries are missing from 0 on"),
        ([], [], "0 of 1 parts are there"),
        ([4], [[range(4), range(2)]], "doesn't have 1 dimensions"),
    ],
)
def test_parts_that_dont_make_up_a_tensor(shape: list[int], regions: list[list[list[int]]], problem: str) -> None:
    assert problem in str(partition_problem(shape, [Region.of_entries(one) for one in regions]))


def test_a_tensor_without_entries_needs_no_parts() -> None:
    assert partition_problem([0, 3], []) is None
    assert partition_problem([0, 4], [Region.of_entries([[], [0, 1]]), Region.of_entries([[], [2, 3]])]) is None
