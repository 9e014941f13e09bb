"""Schedules for a loss of all micro-batches together: no backward begins before the last forward."""

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import CostModel, Kind, build, schedule_names, simulate

EVEN = CostModel(forward=1, backward_input=1, backward_weight=1)
SIZES = [(2, 2), (2, 8), (4, 4), (4, 8), (4, 16), (8, 8), (8, 16)]


@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_waves_reach_the_bound(ranks: int, microbatches: int, waves: int) -> None:
    """The last rank waits for its first forward, and between its last forward and its first backward."""
    sizes = {"num_ranks": ranks, "num_microbatches": microbatches, "num_waves": waves}
    schedule = build("hanayo-zb", **sizes, costs=EVEN, forwards_first=True)
    assert simulate(schedule, EVEN).makespan == pytest.approx(3 * microbatches + (ranks - 1) * 3 / (2 * waves))


@pytest.mark.parametrize("name", schedule_names())
def test_every_schedule_runs_forwards_first_and_keeps_its_order(name: str) -> None:
    usual = build(name, num_ranks=4, num_microbatches=8)
    schedule = build(name, num_ranks=4, num_microbatches=8, forwards_first=True)
    for row, before in zip(schedule.actions, usual.actions, strict=True):
        kinds = [action.kind is Kind.F for action in row]
        assert kinds == sorted(kinds, reverse=True)
        if name != "hanayo-zb":  # whose order is searched
            assert row == tuple(sorted(before, key=lambda action: action.kind is not Kind.F))
    assert max(simulate(schedule).peak_activations) == 8


def test_a_budget_of_fewer_activations_is_refused() -> None:
    with pytest.raises(HanayoError, match="holds 8 M_a of activations.*activation_budget=4"):
        build("hanayo-zb", num_ranks=4, num_microbatches=8, activation_budget=4, forwards_first=True)
