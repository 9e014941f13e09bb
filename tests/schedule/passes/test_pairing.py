"""Pairing: the step gets no longer, no rank holds too much, and each stage keeps the order of its micro-batches."""

from collections import defaultdict
from unittest.mock import patch

import pytest
from hypothesis import given

from lightning_hanayo.schedule import Action, CostModel, Kind, Schedule, simulate, validate
from lightning_hanayo.schedule.cost import Segment
from lightning_hanayo.schedule.passes.pairing import pair_up
from tests.schedule.samples import LINK, make, paired, row, schedules, table, unhurried

COSTS = CostModel(segments=LINK)


def orders(schedule: Schedule) -> dict[tuple[int, Kind], list[int | None]]:
    """The order of micro-batches for each stage and kind."""
    found: dict[tuple[int, Kind], list[int | None]] = defaultdict(list)
    for cells in schedule.actions:
        for action in cells:
            found[action.stage, action.kind].append(action.microbatch)
    return found


@given(schedules(max_ranks=3, max_microbatches=6))
@unhurried
def test_what_pairing_promises(schedule: Schedule) -> None:
    made = paired(schedule)
    validate(made)
    assert orders(made) == orders(schedule)
    before, after = simulate(schedule, COSTS), simulate(made, COSTS)
    assert after.makespan <= before.makespan + 1e-6
    assert all(now <= then + 1 for now, then in zip(after.peak_activations, before.peak_activations, strict=True))
    added = made.pairs - schedule.pairs
    assert all(first.kind is Kind.F and second.kind in (Kind.B, Kind.I) for first, second in added)


def test_one_rank_pairs_each_forward_with_the_backward_before() -> None:
    r"""Half of each action is a gather, whose link is free while the other one computes.

    F0  F1+B0  F2+B1  F3+B2  B3        B takes twice as long as F, so each pair takes as long as its backward
    """
    gather = (Segment(start=1.0), Segment(wait=0), Segment(1.0))
    costs = CostModel(backward_weight=0.0, segments=(("F", gather), ("B", gather)))
    alone = table("0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3", stage_ranks=(0,), num_microbatches=4)
    made = pair_up(alone, costs)
    pairs: set[tuple[Action, ...]] = {row("0F1 0B0"), row("0F2 0B1"), row("0F3 0B2")}
    assert made.pairs == pairs
    assert simulate(alone, costs).makespan == 8.0
    assert simulate(made, costs).makespan == pytest.approx(1 + 3 * 1.5 + 1)


def test_a_schedules_own_pairs_are_kept_unless_others_are_faster() -> None:
    own = make("dualpipev", 4, 8)
    made = paired(own)
    assert made == paired(own)
    assert simulate(made, COSTS).makespan <= simulate(own, COSTS).makespan + 1e-6


@pytest.mark.parametrize("budget", [2.0, 2.5])
def test_a_budget_is_kept(budget: float) -> None:
    schedule = make("hanayo-zb", 2, 4)
    with patch("lightning_hanayo.schedule.passes.pairing.EFFORT", 20_000):
        made = pair_up(schedule, COSTS, budget=budget)
    assert max(simulate(made, COSTS).peak_activations) <= budget
    assert simulate(made, COSTS).makespan < simulate(schedule, COSTS).makespan
