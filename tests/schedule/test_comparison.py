"""Comparisons: which schedules are compared, with which depth, and why others aren't."""

from typing import Any

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import CostModel, build, register_schedule, registry, schedule_names, simulate
from lightning_hanayo.schedule.communication import complete, messages_per_microbatch
from lightning_hanayo.schedule.comparison import compare
from lightning_hanayo.schedule.registry import sizes_for


def test_every_schedule_is_compared_or_has_a_reason() -> None:
    comparison = compare(num_ranks=4, num_microbatches=8, num_waves=2)
    taken = [one.name for one in comparison.candidates]
    assert sorted([*taken, *comparison.refused]) == sorted(schedule_names())
    assert "hanayo" in taken
    assert comparison.refused["zbv"] == "'zbv' has two stages per rank, as one wave has; got num_waves=2"


def test_the_fastest_comes_first() -> None:
    times = [one.timeline.makespan for one in compare(num_ranks=4, num_microbatches=8).candidates]
    assert times == sorted(times)


@pytest.mark.parametrize("num_waves", [1, 2])
def test_the_depth_is_that_of_the_waves(num_waves: int) -> None:
    for one in compare(num_ranks=4, num_microbatches=4, num_waves=num_waves).candidates:
        assert len(one.schedule.stages_of(0)) in (1, 2 * num_waves), one.name


def test_sizes_follow_from_the_registered_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))
    for name, depth in (("one", "one"), ("two", "two"), ("any", "stages"), ("waves", "waves")):
        register_schedule(name, depth)(lambda request: build("gpipe", num_ranks=1, num_microbatches=1))
    assert [sizes_for(name, 3) for name in ("one", "any", "waves")] == [
        {},
        {"num_stages_per_rank": 6},
        {"num_waves": 3},
    ]
    assert sizes_for("two", 1) == {}
    with pytest.raises(HanayoError, match="two stages per rank"):
        sizes_for("two", 3)


def test_schedules_within_the_budget_are_marked() -> None:
    candidates = compare(num_ranks=4, num_microbatches=8, activation_budget=3).candidates
    within_budget = {one.name: one.within_budget for one in candidates}
    assert within_budget["hanayo"]
    assert not within_budget["1f1b"]
    assert not within_budget["gpipe"]
    for one in candidates:
        assert one.within_budget == (one.peak <= 3)


def test_a_name_given_twice_is_compared_once() -> None:
    names = ["hanayo", "hanayo"]
    assert len(compare(num_ranks=2, num_microbatches=2, names=names).candidates) == 1


def test_tables_are_compared_with_schedules_of_their_sizes() -> None:
    table = build("1f1b", num_ranks=2, num_microbatches=4)
    costs = CostModel(forward=(1.0, 2.0))
    found = compare(
        num_ranks=2, num_microbatches=4, costs=costs, activation_budget=1, names=["1f1b"], tables={"mine": table}
    )
    own, mine = sorted(found.candidates, key=lambda one: one.name)
    assert (own.name, mine.name) == ("1f1b", "mine")
    assert mine.timeline.makespan == own.timeline.makespan == simulate(table, costs).makespan
    assert not mine.within_budget
    with pytest.raises(HanayoError, match="mine is a table of 2 ranks and 4 micro-batches"):
        compare(num_ranks=2, num_microbatches=8, tables={"mine": table})


@pytest.mark.parametrize("wrong", [{"num_waves": 0}, {"num_ranks": 0}, {"activation_budget": float("nan")}])
def test_sizes_that_are_wrong_for_all_raise(wrong: dict[str, Any]) -> None:
    with pytest.raises(HanayoError, match=next(iter(wrong))):
        compare(**{"num_ranks": 2, "num_microbatches": 2} | wrong)


def test_without_a_budget_all_are_within_it() -> None:
    assert all(one.within_budget for one in compare(num_ranks=2, num_microbatches=4).candidates)


def test_steps_follow_each_other() -> None:
    (one,) = compare(num_ranks=2, num_microbatches=4, steps=3, names=["hanayo"]).candidates
    assert one.timeline == simulate(one.schedule, steps=3)


def test_costs_of_small_stages_add_up_for_large_ones() -> None:
    fine = CostModel(forward=(1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0), backward_input=2.0, message=(0.1,) * 7 + (0.0,))
    coarse = fine.merged(2)
    assert coarse.forward == (5.0, 4.0)
    assert coarse.backward_input == 2.0
    assert coarse.message == (0.1, 0.0)
    assert fine.merged(8) == fine
    assert CostModel(message=(0.1, 0.2, 0.3)).merged(2).message == (0.2, 0.0)


def test_costs_that_cannot_be_divided_are_a_reason() -> None:
    comparison = compare(num_ranks=2, num_microbatches=2, costs=CostModel(forward=(1.0, 2.0, 3.0)))
    assert not comparison.candidates
    assert comparison.refused["1f1b"] == "forward has 3 values, which can't be shared evenly by 2 stages"


def test_every_candidate_does_the_same_work() -> None:
    costs = CostModel(forward=(0.25,) * 15 + (0.5,), backward_input=(0.25,) * 16, backward_weight=(0.25,) * 16)
    for one in compare(num_ranks=4, num_microbatches=4, num_waves=2, costs=costs).candidates:
        assert sum(one.timeline.busy) == pytest.approx(4 * 12.25), one.name


@pytest.mark.parametrize("name", schedule_names())
def test_messages_are_those_of_the_completed_table(name: str) -> None:
    schedule = build(name, num_ranks=4, num_microbatches=8)
    sends = sum(action.kind in ("SEND_F", "SEND_B") for row in complete(schedule) for action in row)
    assert messages_per_microbatch(schedule) * schedule.num_microbatches == sends
