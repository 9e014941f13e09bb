"""zb-h1."""

import pytest

from lightning_hanayo.schedule import CostModel, simulate
from tests.schedule.samples import make, row
from tests.schedule.torch_orders import as_text, torch_order


def test_the_picture() -> None:
    schedule = make("zb-h1", 3, 4)
    assert schedule.stage_ranks == (0, 1, 2)
    assert schedule.actions == (
        row("0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"),
        row("1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3"),
        row("2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"),
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 16])
def test_the_closed_form(num_ranks: int) -> None:
    for num_microbatches in sorted({1, num_ranks - 1 or 1, num_ranks, num_ranks + 1, 3 * num_ranks}):
        timeline = simulate(make("zb-h1", num_ranks, num_microbatches))
        full = 3 * num_microbatches + num_ranks - 1
        assert timeline.makespan == max(full, 2 * num_microbatches + 2 * num_ranks - 1)
        assert max(timeline.peak_activations) == min(num_microbatches, num_ranks)


COSTS = [(1.0, 1.2, 0.8), (1.0, 1.0, 0.5), (1.5, 1.0, 1.0), (1.0, 0.8, 1.2), (1.0, 2.0, 2.0), (1.0, 1.0, 3.0)]


@pytest.mark.parametrize(("forward", "backward", "weight"), COSTS)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_idle_time_under_other_costs(num_ranks: int, forward: float, backward: float, weight: float) -> None:
    costs = CostModel(forward, backward, weight)
    printed = forward + backward - weight
    per_rank = max(forward, backward, printed)
    assert (per_rank == printed) == (weight <= min(forward, backward))
    for num_microbatches in (num_ranks, num_ranks + 1, 4 * num_ranks):
        timeline = simulate(make("zb-h1", num_ranks, num_microbatches), costs)
        idle = timeline.makespan - num_microbatches * (forward + backward + weight)
        assert idle == pytest.approx((num_ranks - 1) * per_rank)


@pytest.mark.parametrize("num_microbatches", [4, 8, 16])
def test_it_idles_a_third_as_long_as_1f1b_and_holds_as_much(num_microbatches: int) -> None:
    ours, plain = (simulate(make(name, 4, num_microbatches)) for name in ("zb-h1", "1f1b"))
    work = 3 * num_microbatches
    assert plain.makespan - work == 3 * (ours.makespan - work)
    assert max(ours.peak_activations) == max(plain.peak_activations) == 4


def test_it_is_torchs_zero_bubble_order_with_one_stage_per_rank() -> None:
    for num_microbatches in (1, 3, 4, 8, 10):
        theirs = torch_order("ScheduleInterleavedZeroBubble", 4, num_microbatches, 1)
        assert as_text(make("zb-h1", 4, num_microbatches)) == theirs
