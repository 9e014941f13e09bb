"""A part of a table is a table that can run: some forwards, all but some forwards, the loss's backwards alone."""

import pytest
from hypothesis import given

from lightning_hanayo.schedule import (
    Schedule,
    build,
    complete,
    forward_only,
    last_backward_only,
    validate,
    without_forwards,
)
from lightning_hanayo.schedule.communication import first_microbatches
from tests.schedule.message_rule import executable_order, table_waits
from tests.schedule.samples import schedules, unhurried

TABLE = build("hanayo", num_ranks=2, num_microbatches=3)
"""
rank 0    0F0 0F1 0F2 3F0 3B0 ...
rank 1    1F0 2F0 ...
"""


def cells(schedule: Schedule) -> list[set[str]]:
    return [{str(action) for action in row} for row in schedule.actions]


def test_the_forwards_of_some_micro_batches() -> None:
    assert cells(forward_only(TABLE, (0, 2))) == [{"0F0", "3F0", "0F2", "3F2"}, {"1F0", "2F0", "1F2", "2F2"}]


def test_all_but_the_forwards_of_a_micro_batch() -> None:
    before, after = cells(TABLE), cells(without_forwards(TABLE, (0,)))
    assert [old - new for old, new in zip(before, after, strict=True)] == [{"0F0", "3F0"}, {"1F0", "2F0"}]


def test_the_backwards_of_the_last_stage_alone() -> None:
    assert cells(last_backward_only(TABLE, (0, 1))) == [{"3B0", "3B1"}, set()]


@pytest.mark.parametrize("name", ["hanayo", "hanayo-zb", "1f1b", "gpipe", "zbv"])
def test_the_parts_run_one_after_the_other(name: str) -> None:
    table = build(name, num_ranks=2, num_microbatches=4)
    for part in (forward_only(table, (0,)), without_forwards(table, (0,)), without_forwards(table, range(4))):
        rows = complete(part)
        waits = table_waits(part, rows)
        assert len(list(executable_order(rows, waits))) == sum(map(len, rows))


def test_a_pair_of_which_one_action_is_left_is_no_pair() -> None:
    table = build("dualpipev", num_ranks=1, num_microbatches=3)
    assert {(str(first), str(second)) for first, second in table.pairs} == {
        ("1F1", "0B0"),
        ("0F2", "1B1"),
        ("1F2", "0B1"),
    }
    assert {(str(first), str(second)) for first, second in first_microbatches(table, 2).pairs} == {("1F1", "0B0")}
    assert not forward_only(table).pairs
    assert not without_forwards(table, range(3)).pairs


@given(schedules(max_ranks=4, max_microbatches=5))
@unhurried
def test_a_smaller_batch_keeps_the_pairs_that_it_can(schedule: Schedule) -> None:
    for num_microbatches in range(1, schedule.num_microbatches):
        part = first_microbatches(schedule, num_microbatches)
        validate(part)
        held = {action for row in part.actions for action in row}
        assert part.pairs == {pair for pair in schedule.pairs if held.issuperset(pair)}
