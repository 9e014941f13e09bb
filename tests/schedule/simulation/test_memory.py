"""Memory in bytes."""

from typing import Any

import pytest
from hypothesis import given

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import CostModel, Schedule, Timeline, build, simulate, with_loss_stage
from lightning_hanayo.schedule.simulation.memory import MemoryModel, RankMemory
from tests.schedule.samples import schedules, unhurried

MODEL = MemoryModel(activation=8.0, weights=100.0, gradients=200.0, optimizer=400.0)


def test_the_peaks_of_two_ranks() -> None:
    """1F1B with P = 2: rank 0 holds two micro-batches' activations, rank 1 one."""
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=4))
    assert MODEL.peaks(timeline) == (RankMemory(100, 200, 400, 16), RankMemory(100, 200, 400, 8))
    assert [rank.total for rank in MODEL.peaks(timeline)] == [716, 708]


def test_a_curve_includes_weights_gradients_and_optimizer() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2))
    assert MODEL.curve(timeline, 1) == ((0, 700), (1, 708), (4, 708), (7, 700))


def test_each_stages_own_bytes() -> None:
    r"""A wave on two ranks: stages 0 and 3 on rank 0, 1 and 2 on rank 1.

    0     3        1 + 8 bytes
      1 2          2 + 4
    """
    timeline = simulate(build("hanayo", num_ranks=2, num_microbatches=1))
    each = (1.0, 2.0, 4.0, 8.0)
    peaks = MemoryModel(each, weights=each, gradients=10.0).peaks(timeline)
    assert peaks == (RankMemory(9, 10, 0, 9), RankMemory(6, 10, 0, 6))


def test_the_loss_stage_may_be_left_out() -> None:
    schedule = with_loss_stage(build("1f1b", num_ranks=2, num_microbatches=2))
    timeline = simulate(schedule, CostModel(forward=(1.0, 1.0, 0.5)))
    out, told = MemoryModel((1.0, 2.0)), MemoryModel((1.0, 2.0, 4.0))
    assert [rank.activations for rank in out.peaks(timeline)] == [2, 2]
    assert [rank.activations for rank in told.peaks(timeline)] == [6, 2]


def test_what_is_not_held_all_the_time() -> None:
    """1F1B with P = 2; forward 1, backward 2, and messages take no time.

    rank 0   F0 F1      B0 B0 F2       B1 B1 .. B2 B2
    rank 1      F0 B0 B0   F1 B1 B1    F2 B2 B2
    """
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=3))

    def peaks(**sizes: Any) -> list[RankMemory]:
        return list(MemoryModel(0.0, **sizes).peaks(timeline))

    assert [peak.messages for peak in peaks(message=5.0)] == [5, 5]
    assert [peak.messages for peak in peaks(send_buffers=(2.0, 3.0))] == [2, 3]
    assert [peak.suspended for peak in peaks(suspended=(1.0, 4.0))] == [2, 4]
    assert [peak.gathered for peak in peaks(gathered=7.0)] == [7, 7]
    spikes = {"forward_workspace": 1.0, "backward_workspace": (6.0, 0.0)}
    assert [peak.workspace for peak in peaks(**spikes)] == [6, 1]
    curve = MemoryModel(0.0, new_gradients=9.0).curve(timeline, 0)
    assert [held for time, held in curve if time in (0.0, 4.0)] == [0.0, 9.0]
    assert curve[-1] == (timeline.makespan, 0.0)


def test_weight_gradients_wait_with_less_than_the_activations() -> None:
    """After `I` a micro-batch holds 3 of its 8 bytes."""
    timeline = simulate(build("zb-h1", num_ranks=1, num_microbatches=1))
    whole, part = (MemoryModel(8.0, queue=queue).curve(timeline, 0) for queue in (None, 3.0))
    assert whole == ((0.0, 8.0), (3.0, 0.0))
    assert part == ((0.0, 8.0), (2.0, 3.0), (3.0, 0.0))


def test_gradients_of_tied_weights_wait_for_the_first_stage() -> None:
    """From the end of the last stage's backward (3B0) to the end of the first one's (0B0)."""
    timeline = simulate(build("hanayo", num_ranks=2, num_microbatches=1))
    curve = MemoryModel(0.0, tied=5.0).curve(timeline, 0)
    ends = [span.end for span in timeline.spans if str(span.action) in ("3B0", "0B0")]
    assert [(time, held) for time, held in curve if time in ends] == [(min(ends), 5.0), (max(ends), 0.0)]


@given(schedules())
@unhurried
def test_bytes_follow_the_activations(schedule: Schedule) -> None:
    timeline = simulate(schedule)
    for rank, peak in enumerate(MODEL.peaks(timeline)):
        assert peak.activations == pytest.approx(8 * timeline.peak_activations[rank], abs=1e-6)
        curve = MODEL.curve(timeline, rank)
        assert [time for time, _ in curve] == [time for time, _ in timeline.activations(rank)]
        assert max(held for _, held in curve) == pytest.approx(peak.total, abs=1e-6)


def test_no_spans_hold_nothing() -> None:
    assert MODEL.peaks(Timeline(())) == ()


@pytest.mark.parametrize(
    "sizes",
    [{"activation": -1.0}, {"activation": 1.0, "weights": ()}, {"activation": "8"}, {"activation": float("inf")}],
)
def test_bytes_are_no_negative_number(sizes: dict[str, Any]) -> None:
    with pytest.raises(HanayoError, match="expected a finite number of bytes of at least 0, or one per stage"):
        MemoryModel(**sizes)


def test_a_tuple_of_the_wrong_length() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2))
    with pytest.raises(HanayoError, match="weights has 3 values, the timeline 2 stages"):
        MemoryModel(1.0, weights=(1.0, 1.0, 1.0)).peaks(timeline)
