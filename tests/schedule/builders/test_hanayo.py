"""hanayo: the paper's order at B = P, and our own for any other B."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Action, CostModel, Kind, Schedule, build, simulate
from lightning_hanayo.schedule.builders.hanayo import paper_order
from tests.harness.thorough import covered
from tests.schedule.samples import make


def costs(ratio: float, message: float = 0.0) -> CostModel:
    return CostModel(1.0, ratio / 2, ratio / 2, message)


def short(actions: tuple[Action, ...]) -> str:
    """As the paper draws a row: kind and micro-batch."""
    return " ".join(f"{action.kind}{action.microbatch}" for action in actions)


@pytest.mark.parametrize(("num_ranks", "num_waves"), [(1, 1), (2, 3), (4, 1), (5, 2), (8, 2)])
def test_a_single_group_is_the_papers_for_all_costs(num_ranks: int, num_waves: int) -> None:
    for given_costs in (None, costs(1), costs(3, 0.2)):
        built = build("hanayo", num_ranks=num_ranks, num_microbatches=num_ranks, num_waves=num_waves, costs=given_costs)
        assert built == paper_order("hanayo", num_ranks, num_waves, num_ranks)


def test_the_printed_orders() -> None:
    schedule = build("hanayo", num_ranks=4, num_microbatches=4)
    assert short(schedule.actions[1]) == "F0 F1 F2 F0 F3 F1 B0 F2 B1 F3 B2 B0 B3 B1 B2 B3"
    assert short(schedule.actions[0]) == "F0 F1 F2 F3 F0 B0 F1 B1 F2 B2 F3 B3 B0 B1 B2 B3"


@pytest.mark.parametrize("num_ranks", covered(range(2, 17), by=(2, 3, 4, 7, 8, 16)))
@pytest.mark.parametrize("num_waves", range(1, 5))
def test_the_closed_form_and_the_peaks(num_ranks: int, num_waves: int) -> None:
    schedule = paper_order("hanayo", num_ranks, num_waves, num_ranks)
    hops = 4 * num_waves * (num_ranks - 1) + 2 * (num_ranks - 2)
    for ratio, message in product((1, 2, 3), (0.0, 0.017, 0.1, 0.25)):
        timeline = simulate(schedule, costs(ratio, message))
        idle = (num_ranks - 1) * max(1, ratio) / num_waves + hops * message
        assert timeline.makespan == pytest.approx(num_ranks * (1 + ratio) + idle)
    assert timeline.peak_activations[0] == pytest.approx(((2 * num_waves - 1) * num_ranks + 1) / (2 * num_waves))
    assert timeline.peak_activations[-1] == max(timeline.peak_activations) == num_ranks


@pytest.mark.parametrize("num_waves", [1, 2, 4])
def test_the_real_bubble_not_the_papers_equation(num_waves: int) -> None:
    timeline = simulate(make("hanayo", 8, 8, num_waves))
    assert timeline.bubble_ratio == pytest.approx(14 / (24 * num_waves + 14))


@pytest.mark.parametrize(("groups", "overlapped", "wanted"), [(2, 0.262, 0.262), (4, 0.220, 0.193), (8, 0.197, 0.107)])
def test_more_microbatches_beat_overlapped_groups(groups: int, overlapped: float, wanted: float) -> None:
    bubble = simulate(make("hanayo", 4, 4 * groups)).bubble_ratio
    assert bubble <= min(overlapped, wanted)


SIZES = [(p, w, g) for p in range(2, 9) for w in range(1, 5) for g in (2, 3, 5, 8) if p * p * w * g <= 200]


@pytest.mark.parametrize(("num_ranks", "num_waves", "groups"), SIZES)
def test_several_groups_idle_no_longer_than_one(num_ranks: int, num_waves: int, groups: int) -> None:
    """So the bubble falls as B grows, over multiples of P (between them a smaller last group may cost more)."""
    num_microbatches = groups * num_ranks
    timeline = simulate(make("hanayo", num_ranks, num_microbatches, num_waves))
    assert timeline.makespan == pytest.approx(3 * num_microbatches + (num_ranks - 1) * 2 / num_waves)
    assert max(timeline.peak_activations) <= num_ranks


@pytest.mark.parametrize(("ratio", "message"), [(1, 0.0), (3, 0.0), (1, 0.1), (2, 0.02), (2, 0.1)])
@pytest.mark.parametrize(("num_ranks", "num_waves"), [(2, 3), (4, 1), (4, 2)])
def test_the_bubble_falls_under_given_costs(ratio: float, message: float, num_ranks: int, num_waves: int) -> None:
    given_costs = costs(ratio, message)
    bubbles = []
    for groups in (1, 2, 4):
        schedule = build(
            "hanayo", num_ranks=num_ranks, num_microbatches=groups * num_ranks, num_waves=num_waves, costs=given_costs
        )
        bubbles.append(simulate(schedule, given_costs).bubble_ratio)
    assert bubbles == sorted(bubbles, reverse=True)


def concatenated(num_ranks: int, num_waves: int, num_microbatches: int) -> Schedule:
    """Whole groups of P, one list after another."""
    group = make("hanayo", num_ranks, num_ranks, num_waves)
    starts = range(0, num_microbatches, num_ranks)
    rows = tuple(
        tuple(Action(one.stage, one.kind, (one.microbatch or 0) + start) for start in starts for one in actions)
        for actions in group.actions
    )
    return Schedule("concatenated", group.stage_ranks, rows, len(starts) * num_ranks)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 16))
@settings(max_examples=10, deadline=None)
def test_any_number_of_microbatches(num_ranks: int, num_waves: int, num_microbatches: int) -> None:
    timeline = simulate(make("hanayo", num_ranks, num_microbatches, num_waves))
    assert max(timeline.peak_activations) <= num_ranks
    assert timeline.makespan <= simulate(concatenated(num_ranks, num_waves, num_microbatches)).makespan + 1e-9


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 12), st.floats(1.0, 6.0), st.sampled_from([0.0, 0.1]))
@settings(max_examples=10, deadline=None)
def test_any_budget(num_ranks: int, num_waves: int, num_microbatches: int, budget: float, message: float) -> None:
    schedule = build(
        "hanayo",
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_waves=num_waves,
        activation_budget=budget,
        costs=CostModel(message=message),
    )
    assert max(simulate(schedule).peak_activations) <= budget + 1e-9


def test_less_than_one_microbatch_is_no_budget() -> None:
    with pytest.raises(HanayoError, match=r"activation_budget=0\.5, expected at least 1"):
        build("hanayo", num_ranks=4, num_microbatches=4, activation_budget=0.5)


def test_one_rank_holds_two_stages() -> None:
    schedule = build("hanayo", num_ranks=1, num_microbatches=2)
    assert schedule.stage_ranks == (0, 0)
    assert simulate(schedule).bubble_ratio == pytest.approx(0)


def test_the_order_follows_the_costs_of_the_stages() -> None:
    uneven = CostModel(forward=(0.5, 0.5, 0.5, 1.5) * 2, backward_input=0.9, backward_weight=1.1)
    ours, plain = (
        build("hanayo", num_ranks=4, num_microbatches=16, costs=given_costs) for given_costs in (uneven, None)
    )
    assert simulate(ours, uneven).makespan <= simulate(plain, uneven).makespan


def test_the_same_request_gives_the_same_table() -> None:
    first, second = (build("hanayo", num_ranks=4, num_microbatches=10, num_waves=2) for _ in range(2))
    assert first == second
    assert {action.kind for actions in first.actions for action in actions} == {Kind.F, Kind.B}


def test_waves_fix_the_stages_per_rank() -> None:
    with pytest.raises(HanayoError, match="has 4 stages per rank here, got num_stages_per_rank=2"):
        build("hanayo", num_ranks=2, num_microbatches=2, num_waves=2, num_stages_per_rank=2)
