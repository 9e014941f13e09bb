"""interleaved-zb."""

import pytest

from lightning_hanayo.schedule import build, simulate
from lightning_hanayo.schedule.builders.classic import group_size
from tests.schedule.samples import make, row
from tests.schedule.torch_orders import as_text, torch_order

THEIRS = "ScheduleInterleavedZeroBubble"


def test_a_rank_delays_as_many_weight_gradients_as_its_number() -> None:
    schedule = build("interleaved-zb", num_ranks=2, num_microbatches=3, num_stages_per_rank=1)
    assert schedule.actions == (
        row("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"),
        row("1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"),
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_it_is_the_order_torch_generates(num_ranks: int, stages: int) -> None:
    for num_microbatches in range(1, 3 * num_ranks + 1):
        schedule = make("interleaved-zb", num_ranks, num_microbatches, stages)
        if num_microbatches % max(1, num_microbatches // num_ranks):
            with pytest.raises(ValueError, match="multiple"):
                torch_order(THEIRS, num_ranks, num_microbatches, stages)
        else:
            assert as_text(schedule) == torch_order(THEIRS, num_ranks, num_microbatches, stages)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_closed_form(num_ranks: int, stages: int) -> None:
    for num_microbatches in (num_ranks, 2 * num_ranks, 4 * num_ranks):
        timeline = simulate(make("interleaved-zb", num_ranks, num_microbatches, stages))
        assert timeline.makespan == pytest.approx(3 * num_microbatches + (num_ranks - 1) / stages)
        assert max(timeline.peak_activations) == num_ranks


@pytest.mark.parametrize("num_ranks", [3, 4, 7])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_larger_groups_idle_no_longer_and_hold_more(num_ranks: int, stages: int) -> None:
    for num_microbatches in range(num_ranks, 2 * num_ranks):
        timeline = simulate(make("interleaved-zb", num_ranks, num_microbatches, stages))
        assert timeline.makespan == pytest.approx(3 * num_microbatches + (num_ranks - 1) / stages)
        held = ((stages - 1) * group_size(num_ranks, num_microbatches) + num_ranks) / stages
        assert max(timeline.peak_activations) == pytest.approx(held)


@pytest.mark.parametrize(("num_microbatches", "bubble"), [(4, 0.111), (8, 0.059), (16, 0.030)])
def test_the_known_bubbles_of_two_stages(num_microbatches: int, bubble: float) -> None:
    timeline = simulate(build("interleaved-zb", num_ranks=4, num_microbatches=num_microbatches))
    assert timeline.bubble_ratio == pytest.approx(bubble, abs=6e-4)


@pytest.mark.parametrize("num_ranks", range(1, 7))
def test_sizes_that_torch_rejects_keep_to_the_memory_of_whole_groups(num_ranks: int) -> None:
    for num_microbatches in range(2 * num_ranks, 4 * num_ranks):
        if num_microbatches % (num_microbatches // num_ranks):
            timeline = simulate(make("interleaved-zb", num_ranks, num_microbatches, 2))
            assert max(timeline.peak_activations) <= num_ranks
