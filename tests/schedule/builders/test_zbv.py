"""zbv."""

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import build, simulate
from tests.schedule.samples import make, row
from tests.schedule.torch_orders import as_text, torch_order


def test_the_picture() -> None:
    schedule = make("zbv", 2, 3)
    assert schedule.stage_ranks == (0, 1, 1, 0)
    assert schedule.actions == (
        row("0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2"),
        row("1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"),
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
def test_it_is_the_order_torch_generates(num_ranks: int) -> None:
    for num_microbatches in range(1, 3 * num_ranks + 1):
        theirs = torch_order("ScheduleZBVZeroBubble", num_ranks, num_microbatches, 2)
        assert as_text(make("zbv", num_ranks, num_microbatches)) == theirs


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 16])
def test_the_closed_form(num_ranks: int) -> None:
    for num_microbatches in sorted({1, 2, num_ranks, 2 * num_ranks - 2 or 1, 2 * num_ranks - 1, 3 * num_ranks}):
        timeline = simulate(make("zbv", num_ranks, num_microbatches))
        full = 3 * num_microbatches + (num_ranks - 1) / 2
        assert timeline.makespan == pytest.approx(max(full, 2 * num_microbatches + 2 * num_ranks - 1))
        assert max(timeline.peak_activations) == min(num_microbatches, num_ranks)


@pytest.mark.parametrize(("num_microbatches", "bubble"), [(4, 0.20), (8, 0.059), (16, 0.030)])
def test_the_known_bubbles(num_microbatches: int, bubble: float) -> None:
    timeline = simulate(build("zbv", num_ranks=4, num_microbatches=num_microbatches))
    assert timeline.bubble_ratio == pytest.approx(bubble, abs=6e-4)


@pytest.mark.parametrize("wrong", [{"num_waves": 2}, {"num_stages_per_rank": 3}])
def test_one_wave_only(wrong: dict[str, int]) -> None:
    with pytest.raises(HanayoError, match="zbv"):
        build("zbv", num_ranks=2, num_microbatches=2, **wrong)  # type: ignore[arg-type]
