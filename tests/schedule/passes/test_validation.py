"""Invalid tables are rejected, with the wrong action marked."""

import time
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Schedule, build, forward_only, validate
from tests.schedule.message_rule import table_waits
from tests.schedule.samples import in_some_pairs, make, row, schedules, table, unhurried


@given(schedules())
@unhurried
def test_all_builders_make_valid_tables(schedule: Schedule) -> None:
    validate(schedule)
    validate(forward_only(schedule))


def can_run(schedule: Schedule) -> bool:
    """Whether nothing waits for itself, where the two of a pair wait for each other's inputs and end together."""
    cell_of = {action: action for cells in schedule.actions for action in cells}
    cell_of |= {second: first for first, second in schedule.pairs}
    waits = {cell: set() for cell in cell_of.values()}
    for action, others in table_waits(schedule).items():
        waits[cell_of[action]] |= {cell_of[other] for other in others}
    for cells in schedule.actions:
        for before, after in pairwise(dict.fromkeys(cell_of[action] for action in cells)):
            waits[after].add(before)
    try:
        TopologicalSorter(waits).prepare()
    except CycleError:
        return False
    return True


@given(schedules(max_ranks=4, max_microbatches=6, pairs=False), st.data())
@unhurried
def test_pairs_are_accepted_if_and_only_if_they_can_run(schedule: Schedule, data: st.DataObject) -> None:
    in_pairs = data.draw(in_some_pairs(schedule, valid=False))
    if can_run(in_pairs):
        validate(in_pairs)
    else:
        with pytest.raises(HanayoError, match="wait for each other and can never run"):
            validate(in_pairs)


@pytest.mark.parametrize(
    ("rows", "why", "cell"),
    [
        (("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), "stage 0 has no whole backward of micro-batch 1: expected 0B1", "[0F1]"),
        (("0F0 0F1 0B0 0I1", "1F0 1B0 1F1 1B1"), "expected 0B1, or 0I1 and 0W1, got I", "[0F1]"),
        (("0F0 0F1 0B0 0B1 0W1", "1F0 1B0 1F1 1B1"), "got B and W", "[0F1]"),
        (("0F0 0B0 0B1", "1F0 1B0 1F1 1B1"), "stage 0 has no forward of micro-batch 1", "[0B1]"),
        (("0F0 0F1 0B0 0B1 0F0", "1F0 1B0 1F1 1B1"), "0F0 appears twice on rank 0, at positions 0 and 4", "[0F0]"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 0F0"), "ranks 0 and 1 both claim stage 0", "[0F0]"),
        (("0F0 0F1 0B0 0B1 2F0", "1F0 1B0 1F1 1B1"), "there is no stage 2, stages are 0 to 1", "[2F0]"),
        (("0F0 0F1 0B0 0B1 0F2", "1F0 1B0 1F1 1B1"), "there is no micro-batch 2", "[0F2]"),
        (("0F0 0SEND_F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), "0SEND_F0 is communication", "[0SEND_F0]"),
    ],
)
def test_the_wrong_action_is_named_and_marked(rows: tuple[str, ...], why: str, cell: str) -> None:
    with pytest.raises(HanayoError) as error:
        validate(table(*rows, stage_ranks=(0, 1), num_microbatches=2))
    assert why in str(error.value)
    assert cell in str(error.value)


@pytest.mark.parametrize(
    ("pairs", "why", "cell"),
    [
        ("1F1 1B1", "they are of one micro-batch; two run at once", "[1B1]"),
        ("0F0 0F2", "the second one must come right behind the first one, on one rank", "[0F2]"),
        ("0F0 1F0", "the second one must come right behind the first one, on one rank", "[1F0]"),
        ("0F0 0F1, 0F1 0B0", "the pair of 0F1 and 0B0: one of them is in another pair, too", "[0F1]"),
        ("0B0 0F2", "the pair of 0B0 and 0F2: F comes before B and I, and B before I, as in 0F2, 0B0", "[0B0]"),
        ("0F1 0B0, 1B0 1F1", "as in 1F1, 1B0", "[1B0]"),
        ("0F0 0B3", "the pair of 0F0 and 0B3: the table has no 0B3", None),
    ],
)
def test_what_is_no_pair_is_named_and_marked(pairs: str, why: str, cell: str | None) -> None:
    made = table("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2", stage_ranks=(0, 1), num_microbatches=3)
    with pytest.raises(HanayoError) as error:
        validate(replace(made, pairs=frozenset((row(pair)[0], row(pair)[1]) for pair in pairs.split(", "))))
    assert why in str(error.value)
    assert cell is None or cell in str(error.value)


def test_a_deadlock_names_which_rank_waits_for_which() -> None:
    with pytest.raises(HanayoError) as error:
        validate(table("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1", stage_ranks=(0, 1), num_microbatches=2))
    message = str(error.value)
    assert "rank 0 at 0B0 waits for 1B0, which comes on rank 1, after 1F1" in message
    assert "rank 1 at 1F1 waits for 0F1, which comes on rank 0, after 0B0" in message
    assert message.count("waits for") == 2
    assert "rank 0  0F0  [0B0]" in message


def test_a_rank_that_waits_for_itself() -> None:
    with pytest.raises(HanayoError, match="rank 0 at 0B0 waits for 0F0, which comes after itself"):
        validate(table("0B0 0F0", stage_ranks=(0,), num_microbatches=1))


def test_shapes_that_are_rejected() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(HanayoError, match="stage 1 is on rank 2, but there are rows for 2 ranks"):
        validate(replace(schedule, stage_ranks=(0, 2)))
    with pytest.raises(HanayoError, match="ranks 0 and 1 both claim stage 1"):
        validate(replace(schedule, stage_ranks=(0, 0)))
    with pytest.raises(HanayoError, match="and 0 micro-batches; expected at least one of each"):
        validate(replace(schedule, num_microbatches=0))
    with pytest.raises(HanayoError, match="has 0 ranks, 0 stages and"):
        validate(replace(schedule, actions=(), stage_ranks=()))
    with pytest.raises(HanayoError, match="has 2 ranks, 0 stages"):
        validate(replace(schedule, actions=((), ()), stage_ranks=()))


def test_a_long_table_is_drawn_only_around_the_wrong_action() -> None:
    schedule = make("1f1b", 2, 200)
    broken = (schedule.actions[0][:150] + schedule.actions[0][151:], schedule.actions[1])
    with pytest.raises(HanayoError) as error:
        validate(replace(schedule, actions=broken))
    assert max(map(len, str(error.value).splitlines())) < 200
    assert "..." in str(error.value)


def test_of_many_ranks_only_those_around_the_wrong_action_are_drawn() -> None:
    schedule = make("1f1b", 200, 2)
    with pytest.raises(HanayoError) as error:
        validate(replace(schedule, actions=(*schedule.actions[:100], (), *schedule.actions[101:])))
    assert [line.split()[1] for line in str(error.value).splitlines()[1:]] == [str(rank) for rank in range(94, 107)]


def test_it_takes_linear_time() -> None:
    """A dependency path as long as the table: repeated scans would take quadratic time, minutes."""
    schedule = make("gpipe", 32, 128)
    begin = time.process_time()
    validate(schedule)
    assert time.process_time() - begin < 10
