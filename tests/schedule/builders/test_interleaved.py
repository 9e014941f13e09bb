"""interleaved."""

import pytest

from lightning_hanayo.schedule import CostModel, build, simulate
from tests.schedule.samples import make, row
from tests.schedule.torch_orders import as_text, torch_order


def test_a_rank_runs_each_of_its_stages_for_a_whole_group() -> None:
    schedule = build("interleaved", num_ranks=2, num_microbatches=2)
    assert schedule.stage_ranks == (0, 1, 0, 1)
    assert schedule.actions == (
        row("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"),
        row("1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"),
    )


@pytest.mark.parametrize("num_ranks", range(2, 17))
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("message", [0.0, 0.1])
def test_the_closed_form(num_ranks: int, stages: int, message: float) -> None:
    timeline = simulate(make("interleaved", num_ranks, num_ranks, stages), CostModel(message=message))
    hops = 2 * (num_ranks * stages - 1)
    assert timeline.makespan == pytest.approx(3 * num_ranks + (num_ranks - 1) * 3 / stages + hops * message)


@pytest.mark.parametrize(("num_microbatches", "bubble"), [(4, 0.158), (8, 0.086), (16, 0.045)])
def test_the_known_bubbles_of_four_stages(num_microbatches: int, bubble: float) -> None:
    timeline = simulate(make("interleaved", 4, num_microbatches, 4))
    assert timeline.bubble_ratio == pytest.approx(bubble, abs=6e-4)


def test_the_known_peak() -> None:
    assert max(simulate(make("interleaved", 4, 16, 4)).peak_activations) == 4.75


@pytest.mark.parametrize("num_ranks", range(1, 7))
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_any_number_of_microbatches(num_ranks: int, stages: int) -> None:
    for num_microbatches in range(1, 2 * num_ranks + 2):
        assert simulate(make("interleaved", num_ranks, num_microbatches, stages)).num_ranks == num_ranks


def test_one_stage_per_rank_costs_what_1f1b_costs() -> None:
    for num_microbatches in (4, 8):
        ours, plain = (simulate(make(name, 4, num_microbatches)) for name in ("interleaved", "1f1b"))
        assert ours.makespan == pytest.approx(plain.makespan)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_order_is_the_one_torch_generates(num_ranks: int, stages: int) -> None:
    compared = 0
    for num_microbatches in range(num_ranks, 3 * num_ranks + 1):
        try:
            expected = torch_order("ScheduleInterleaved1F1B", num_ranks, num_microbatches, stages)
        except ValueError:
            continue
        assert as_text(make("interleaved", num_ranks, num_microbatches, stages)) == expected
        compared += 1
    assert compared > num_ranks
