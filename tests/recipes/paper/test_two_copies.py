"""Chimera and GEMS: the papers' figures and bubbles, and what follows from two copies of the model."""

import pytest

from lightning_hanayo.schedule import Timeline
from recipes.paper import closed_form
from recipes.paper.closed_form import Times
from recipes.paper.two_copies import chimera, gems, simulate_copies
from tests.schedule.samples import row


def run(num_ranks: int, num_microbatches: int, times: Times | None = None) -> Timeline:
    return simulate_copies(chimera(num_ranks, num_microbatches), times)


def test_chimeras_figure() -> None:
    """
    rank 0   F0 .  F1 f2 b2 f3 b3 B0 .  B1
    rank 1      F0 f2 F1 f3 b2 B0 b3 B1
    rank 2      f2 F0 f3 F1 B0 b2 B1 b3
    rank 3   f2 .  f3 F0 B0 F1 B1 b2 .  b3
    """
    schedule = chimera(4, 4)
    assert schedule.actions == (
        row("0F0 0F1 7F2 7B2 7F3 7B3 0B0 0B1"),
        row("1F0 6F2 1F1 6F3 6B2 1B0 6B3 1B1"),
        row("5F2 2F0 5F3 2F1 2B0 5B2 2B1 5B3"),
        row("4F2 4F3 3F0 3B0 3F1 3B1 4B2 4B3"),
    )
    assert schedule.stage_ranks == (0, 1, 2, 3, 3, 2, 1, 0)


def test_many_micro_batches_go_on_in_the_same_slots() -> None:
    assert chimera(4, 8).actions[1] == row("1F0 6F2 1F1 6F3 6B2 1F4 1B0 6F6 6B3 1F5 1B1 6F7 6B6 1B4 6B7 1B5")


@pytest.mark.parametrize(("num_ranks", "bubble"), [(8, 0.3333), (32, 0.3846)])
def test_the_bubbles_that_hanayo_prints_for_chimera(num_ranks: int, bubble: float) -> None:
    assert run(num_ranks, num_ranks).bubble_ratio == pytest.approx(bubble, abs=5e-5)
    assert closed_form.chimera_bubble(num_ranks, Times()) == pytest.approx(bubble, abs=5e-5)


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("backward", [0.5, 1.0, 2.0, 3.0])
def test_chimeras_closed_form(num_ranks: int, backward: float) -> None:
    """Hanayo's formula has 3P - 2 messages at B = P; the order has three fewer."""
    for num_microbatches in (num_ranks, num_ranks + 2, 2 * num_ranks, 5 * num_ranks - 2):
        timeline = run(num_ranks, num_microbatches, Times(1.0, backward))
        compute = num_microbatches * (1.0 + backward) + (num_ranks - 2) * max(1.0, backward)
        assert timeline.makespan == pytest.approx(compute)
        if backward == 2.0:
            messages = max(2, 3 * num_ranks - 4 - (num_microbatches == num_ranks))
            slower = run(num_ranks, num_microbatches, Times(1.0, backward, 0.01))
            assert slower.makespan == pytest.approx(compute + messages * 0.01)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("units", [1, 2, 5])
def test_activations_from_half_of_the_ranks_to_all(num_ranks: int, units: int) -> None:
    half = [num_ranks // 2 + 1 + rank for rank in range(num_ranks // 2)]
    peak = run(num_ranks, units * num_ranks).peak_activations
    assert peak == ((*half, *half[::-1]) if units == 1 else (num_ranks,) * num_ranks)


@pytest.mark.parametrize("num_microbatches", range(1, 12))
def test_half_of_any_number_of_micro_batches_goes_up(num_microbatches: int) -> None:
    schedule = chimera(4, num_microbatches)
    ups = {action.microbatch for actions in schedule.actions for action in actions if action.stage >= 4}
    timeline = simulate_copies(schedule)
    assert len(ups) == num_microbatches // 2
    assert timeline.busy == (3.0 * num_microbatches,) * 4
    assert max(timeline.peak_activations) <= 4
    assert timeline.makespan <= run(4, num_microbatches + 1).makespan


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_gems_holds_one_micro_batch_and_takes_the_derived_time(num_ranks: int) -> None:
    timeline = simulate_copies(gems(num_ranks, num_ranks))
    assert timeline.makespan == closed_form.gems(num_ranks, Times()) == 2 * num_ranks**2 + 2 * num_ranks - 1
    assert set(timeline.peak_activations) == {1.0}
