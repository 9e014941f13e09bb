"""Ranks' clocks are found in what their messages allow."""

import pytest

from lightning_hanayo.runtime.profiling.clock import on_one_clock
from lightning_hanayo.runtime.profiling.measurement import message_delay, timeline_of
from lightning_hanayo.runtime.profiling.message_timing import BatchTrace
from lightning_hanayo.runtime.profiling.trace import Event
from lightning_hanayo.schedule import CostModel, build, with_loss_stage
from tests.runtime.played import event, played

COSTS = CostModel(0.4, 0.6, 0.2, message=0.05)


def shifted(batch: BatchTrace, shifts: list[float]) -> BatchTrace:
    """The batch as ranks write it down whose clocks are ahead by `shifts`."""
    moved = zip(batch, shifts, strict=False)
    return [[Event(e.action, e.reached + s, e.start + s, e.end + s) for e in events] for events, s in moved]


def test_half_of_the_way_there_and_back() -> None:
    """Rank 1's clock is ahead: sent at 1, there at 102; sent at 104, there at 5: by at least 99 s, at most 101 s."""
    batch = ([event("0F0", 0, 0, 1), event("0B0", 1, 5, 6)], [event("1F0", 100, 102, 103), event("1B0", 103, 103, 104)])
    own, other = on_one_clock(build("gpipe", num_ranks=2, num_microbatches=1), batch)
    assert own == batch[0]
    assert [(e.start, e.end) for e in other] == [(2, 3), (3, 4)]


@pytest.mark.parametrize("name", ["hanayo-zb", "1f1b", "interleaved"])
def test_machines_with_clocks_of_their_own(name: str) -> None:
    schedule = with_loss_stage(build(name, num_ranks=4, num_microbatches=8))
    batch = played(schedule, COSTS)
    mended = on_one_clock(schedule, shifted(batch, [0.0, 86_400.0, -3.0, 1e-1]))
    gaps = [
        a.start - b.start for rank, true in zip(mended, batch, strict=True) for a, b in zip(rank, true, strict=True)
    ]
    assert max(map(abs, gaps)) <= 3 * COSTS.message / 2 + 1e-6, "three neighbours, each wrong by half of two messages"
    true = timeline_of(schedule, batch)
    assert timeline_of(schedule, mended).bubble_ratio == pytest.approx(true.bubble_ratio, abs=0.02)
    assert message_delay(schedule, [mended]) == pytest.approx(0.05, rel=0.6)


def test_one_machine_is_left_alone() -> None:
    schedule = build("hanayo", num_ranks=4, num_microbatches=4)
    batch = played(schedule, COSTS)
    assert on_one_clock(schedule, batch) == batch
    alone = build("1f1b", num_ranks=1, num_microbatches=2)
    assert on_one_clock(alone, played(alone, COSTS)) == played(alone, COSTS)
