"""gpipe."""

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import CostModel, build, simulate
from tests.schedule.samples import row


def test_all_forwards_then_all_backwards() -> None:
    schedule = build("gpipe", num_ranks=2, num_microbatches=3)
    assert schedule.actions == (row("0F0 0F1 0F2 0B0 0B1 0B2"), row("1F0 1F1 1F2 1B0 1B1 1B2"))


@pytest.mark.parametrize("num_ranks", range(2, 17))
@pytest.mark.parametrize("message", [0.0, 0.03, 0.2])
def test_the_closed_form(num_ranks: int, message: float) -> None:
    timeline = simulate(build("gpipe", num_ranks=num_ranks, num_microbatches=num_ranks), CostModel(message=message))
    assert timeline.makespan == pytest.approx((2 * num_ranks - 1) * 3 + (2 * num_ranks - 2) * message)
    assert timeline.peak_activations == (num_ranks,) * num_ranks


def test_the_bubble_printed_in_the_paper() -> None:
    assert simulate(build("gpipe", num_ranks=8, num_microbatches=8)).bubble_ratio == pytest.approx(0.4667, abs=5e-5)
    assert simulate(build("gpipe", num_ranks=32, num_microbatches=32)).bubble_ratio == pytest.approx(0.4920, abs=1e-4)


def test_waves_and_more_stages_are_refused() -> None:
    with pytest.raises(HanayoError, match="has no waves, got num_waves=2"):
        build("gpipe", num_ranks=2, num_microbatches=2, num_waves=2)
    with pytest.raises(HanayoError, match="num_stages_per_rank=2"):
        build("gpipe", num_ranks=2, num_microbatches=2, num_stages_per_rank=2)
