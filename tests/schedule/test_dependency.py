"""The dependency rule: which action waits for which."""

import pytest
from hypothesis import given

from lightning_hanayo.schedule import Action, Schedule, complete, waits_for
from lightning_hanayo.schedule.table import executable_order, waits_in
from tests.schedule import message_rule
from tests.schedule.samples import row, schedules, table, unhurried


@pytest.mark.parametrize(
    ("action", "waits"),
    [
        ("0F3", ""),
        ("1F3", "0F3"),
        ("2B3", "2F3"),
        ("1B3", "1F3 2B3|2I3"),
        ("1I3", "1F3 2B3|2I3"),
        ("1W3", "1I3"),
    ],
)
def test_the_rule(action: str, waits: str) -> None:
    got = waits_for(Action.parse(action), num_stages=3)
    assert " ".join("|".join(map(str, one_of)) for one_of in got) == waits


@pytest.mark.parametrize(
    ("action", "waits"),
    [
        ("1F3", "1RECV_F3|0F3"),
        ("1B3", "1F3 1RECV_B3|2B3|2I3"),
        ("1SEND_F3", "1F3"),
        ("1RECV_F3", "0SEND_F3"),
        ("1SEND_B3", "1B3|1I3"),
        ("1RECV_B3", "2SEND_B3"),
        ("1REDUCE_GRAD", "1B0|1W0 1B1|1W1"),
    ],
)
def test_the_rule_of_the_tests_with_messages(action: str, waits: str) -> None:
    got = message_rule.waits_for(Action.parse(action), num_stages=3, num_microbatches=2)
    assert " ".join("|".join(map(str, one_of)) for one_of in got) == waits


def test_a_table_with_receives_waits_for_them() -> None:
    schedule = table("0F0 0B0", "1F0 1B0", stage_ranks=(0, 1), num_microbatches=1)
    compute = waits_in(schedule.actions, 2)
    assert compute[Action.parse("1F0")] == row("0F0")
    completed = message_rule.waits_in(complete(schedule), 2, 1)
    assert completed[Action.parse("1F0")] == row("1RECV_F0")


@given(schedules())
@unhurried
def test_the_executable_order_has_every_action_once_after_what_it_waits_for(schedule: Schedule) -> None:
    waits = waits_in(schedule.actions, schedule.num_stages)
    order = list(executable_order(schedule.actions, waits))
    place = {action: place for place, action in enumerate(order)}
    assert len(order) == len(place) == sum(map(len, schedule.actions))
    assert all(place[other] < place[action] for action in order for other in waits[action])
    for actions in schedule.actions:
        assert [place[action] for action in actions] == sorted(place[action] for action in actions)


def test_the_executable_order_ends_where_all_ranks_wait() -> None:
    lists = (row("0F0 0B0 0F1 0B1"), row("1F1 1B1 1F0 1B0"))
    assert list(executable_order(lists, waits_in(lists, 2))) == list(row("0F0"))
