"""1f1b."""

import pytest

from lightning_hanayo.schedule import CostModel, build, simulate
from tests.schedule.samples import row


def test_one_forward_one_backward() -> None:
    schedule = build("1f1b", num_ranks=3, num_microbatches=4)
    assert schedule.actions == (
        row("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"),
        row("1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"),
        row("2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"),
    )


@pytest.mark.parametrize("num_ranks", range(2, 17))
@pytest.mark.parametrize("message", [0.0, 0.03, 0.2])
def test_the_closed_form(num_ranks: int, message: float) -> None:
    timeline = simulate(build("1f1b", num_ranks=num_ranks, num_microbatches=num_ranks), CostModel(message=message))
    assert timeline.makespan == pytest.approx((2 * num_ranks - 1) * 3 + (4 * num_ranks - 6) * message)
    assert timeline.peak_activations == tuple(range(num_ranks, 0, -1))


@pytest.mark.parametrize(("num_microbatches", "bubble"), [(4, 0.429), (8, 0.273), (16, 0.158), (32, 0.086)])
def test_the_known_bubbles_at_four_ranks(num_microbatches: int, bubble: float) -> None:
    timeline = simulate(build("1f1b", num_ranks=4, num_microbatches=num_microbatches))
    assert timeline.bubble_ratio == pytest.approx(bubble, abs=5e-4)


def test_fewer_microbatches_than_ranks() -> None:
    timeline = simulate(build("1f1b", num_ranks=4, num_microbatches=2))
    assert timeline.makespan == pytest.approx((4 + 2 - 1) * 3)
    assert timeline.peak_activations == (2, 2, 2, 1)
