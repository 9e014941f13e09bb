"""The offsets between the ranks' clocks follow from what their messages allow."""

import pytest

from lightning_hanayo.runtime.profiling.measurement import message_delay, on_one_clock, timeline_of
from lightning_hanayo.runtime.profiling.trace import BatchTrace, Event
from lightning_hanayo.schedule import CostModel, build, with_loss_stage
from tests.runtime.batch_traces import event, simulated_batch

COSTS = CostModel(0.4, 0.6, 0.2, message=0.05)


def shifted(batch: BatchTrace, shifts: list[float]) -> BatchTrace:
    """The batch as recorded by ranks whose clocks are ahead by `shifts`."""
    moved = zip(batch, shifts, strict=False)
    return [[Event(e.action, e.reached + s, e.start + s, e.end + s) for e in events] for events, s in moved]


def test_the_offset_is_the_middle_of_the_possible_ones() -> None:
    """Rank 1's clock is ahead: sent at 1, received at 102; sent at 104, received at 5: by 99 s to 101 s."""
    batch = ([event("0F0", 0, 0, 1), event("0B0", 1, 5, 6)], [event("1F0", 100, 102, 103), event("1B0", 103, 103, 104)])
    own, other = on_one_clock(build("gpipe", num_ranks=2, num_microbatches=1), batch)
    assert own == batch[0]
    assert [(e.start, e.end) for e in other] == [(2, 3), (3, 4)]


@pytest.mark.parametrize("name", ["hanayo-zb", "1f1b", "interleaved"])
def test_machines_with_different_clocks(name: str) -> None:
    schedule = with_loss_stage(build(name, num_ranks=4, num_microbatches=8))
    batch = simulated_batch(schedule, COSTS)
    mended = on_one_clock(schedule, shifted(batch, [0.0, 86_400.0, -3.0, 1e-1]))
    gaps = [
        a.start - b.start for rank, true in zip(mended, batch, strict=True) for a, b in zip(rank, true, strict=True)
    ]
    assert max(map(abs, gaps)) <= 3 * COSTS.message / 2 + 1e-6, "three neighbours, each wrong by half of two messages"
    true = timeline_of(schedule, batch)
    assert timeline_of(schedule, mended).bubble_ratio == pytest.approx(true.bubble_ratio, abs=0.02)
    assert message_delay(schedule, [mended]) == pytest.approx(0.05, rel=0.6)


def test_times_on_one_machine_stay_as_they_are() -> None:
    schedule = build("hanayo", num_ranks=4, num_microbatches=4)
    batch = simulated_batch(schedule, COSTS)
    assert on_one_clock(schedule, batch) == batch
    alone = build("1f1b", num_ranks=1, num_microbatches=2)
    assert on_one_clock(alone, simulated_batch(alone, COSTS)) == simulated_batch(alone, COSTS)
