"""Measurements from traces: figures of drawn batches, and of simulated ones, whose costs and clocks are known."""

from dataclasses import dataclass

import pytest

from lightning_hanayo.clock import DeviceMark, EventClock
from lightning_hanayo.pipeline_parallel.trace import (
    BatchTrace,
    Event,
    costs_of,
    exposed_communication,
    median_batch,
    message_delay,
    message_timings,
    on_one_clock,
    stage_times,
    timeline_of,
    waits_of,
)
from lightning_hanayo.schedule import Action, CostModel, Kind, Schedule, Span, build, with_loss_stage
from tests.runtime.batch_traces import event, simulated_batch

TWO = build("gpipe", num_ranks=2, num_microbatches=1)
"""
seconds   0    1    2    3    4    5    6
rank 0    |0F0 |  . asked  .   .   |0B0 |     waits from 1 on for what is sent at 4 and there at 5
rank 1    asked.    |1F0 |1B0 |               waits from 0 on for what is sent at 1 and there at 2
"""
DRAWN: BatchTrace = (
    (event("0F0", 0, 0, 1), event("0B0", 1, 5, 6)),
    (event("1F0", 0, 2, 3), event("1B0", 3, 3, 4)),
)


def test_a_message_is_exposed_from_its_senders_end() -> None:
    assert [(str(m.sent.action), str(m.received.action), m.waited, m.delay, m.exposed)
            for m in sorted(message_timings(TWO, DRAWN), key=lambda m: m.sent.end)] == [
        ("0F0", "1F0", 2, 1, 1), ("1B0", "0B0", 4, 1, 1),
    ]  # fmt: skip
    assert exposed_communication(TWO, DRAWN) == pytest.approx(2 / (2 * 6))
    assert timeline_of(TWO, DRAWN).bubble_ratio == pytest.approx(8 / 12)


def test_a_message_received_during_computation_is_hidden() -> None:
    late = ((DRAWN[0]), (event("1F0", 3, 3, 4), event("1B0", 4, 4, 5)))
    hidden, _ = sorted(message_timings(TWO, late), key=lambda m: m.sent.end)
    assert (hidden.waited, hidden.delay, hidden.exposed) == (0, 2, 0)


def test_batches_follow_each_other_with_their_waits() -> None:
    second = tuple(tuple(event(str(e.action), e.reached + 10, e.start + 10, e.end + 10) for e in row) for row in DRAWN)
    timeline = timeline_of(TWO, DRAWN, second)
    assert (timeline.num_steps, timeline.makespan) == (2, 16)
    assert [step.begin for step in timeline.steps] == [0, 10]
    first = [Span(0, Action.parse("0B0"), 1, 5), Span(1, Action.parse("1F0"), 0, 2)]
    assert waits_of(DRAWN, second) == [*first, *(Span(s.rank, s.action, s.start + 10, s.end + 10) for s in first)]


COSTS = CostModel(0.4, 0.6, 0.2, message=0.05)


@pytest.mark.parametrize("name", ["hanayo", "hanayo-zb", "1f1b", "zb-h1"])
def test_the_costs_of_a_simulated_batch_are_found(name: str) -> None:
    schedule = with_loss_stage(build(name, num_ranks=2, num_microbatches=4))
    found = costs_of(schedule, [simulated_batch(schedule, COSTS)])
    parts = [schedule.share_of(stage) for stage in range(schedule.num_stages)]
    assert found.message == pytest.approx(0.05)
    assert found.forward == pytest.approx(tuple(0.4 * part for part in parts))
    whole = [i + w for i, w in zip(_tuple(found.backward_input), _tuple(found.backward_weight), strict=True)]
    assert whole == pytest.approx([0.8 * part for part in parts])
    if any(action.kind is Kind.W for row in schedule.actions for action in row):
        assert found.backward_weight == pytest.approx(tuple(0.2 * part for part in parts))
    assert timeline_of(schedule, simulated_batch(schedule, COSTS)).makespan > 0


def _tuple(cost: float | tuple[float, ...]) -> tuple[float, ...]:
    assert isinstance(cost, tuple)
    return cost


def test_free_messages_are_never_exposed_and_others_never_more_than_the_bubble() -> None:
    schedule = build("hanayo-zb", num_ranks=4, num_microbatches=8, num_waves=2)
    assert exposed_communication(schedule, simulated_batch(schedule, CostModel())) == pytest.approx(0)
    slow = simulated_batch(schedule, CostModel(message=0.2))
    assert 0 < exposed_communication(schedule, slow) <= timeline_of(schedule, slow).bubble_ratio


def test_times_are_means_and_the_typical_batch_is_the_median() -> None:
    batches = [simulated_batch(TWO, CostModel(forward=f)) for f in (1.0, 5.0, 3.0)]
    assert stage_times(batches)[1, Kind.F] == pytest.approx(3.0)
    assert median_batch(batches) == batches[2]
    assert _num_events(batches[0]) == 4


def _num_events(batch: BatchTrace) -> int:
    return sum(map(len, batch))


def test_one_rank_has_no_messages() -> None:
    alone = Schedule("alone", (0,), ((Action(0, Kind.F, 0), Action(0, Kind.B, 0)),), 1)
    batch = [[event("0F0", 0, 0, 1), event("0B0", 1, 1, 3)]]
    assert (exposed_communication(alone, batch), costs_of(alone, [batch]).message) == (0, 0)


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


@pytest.mark.parametrize("name", ["hanayo", "1f1b"])
def test_devices_that_were_never_idle_are_put_on_one_axis(name: str) -> None:
    """Each rank's events are too early by how far its host was ahead: no message may come before it was sent."""
    schedule = build(name, num_ranks=4, num_microbatches=4)
    batch = simulated_batch(schedule, COSTS)
    read = []
    for events, lead in zip(batch, (0.0, 0.7, 0.2, 3.0), strict=True):
        clock = EventClock(StreamEvent)
        marks = [DeviceMark(StreamEvent(time), time - lead) for e in events for time in (e.reached, e.start, e.end)]
        times = iter(clock.seconds(marks))
        read.append([Event(e.action, *three) for e, *three in zip(events, times, times, times, strict=True)])
    assert [a.start - b.start for a, b in zip(read[3], batch[3], strict=True)] == pytest.approx([-3.0] * len(batch[3]))
    mended = on_one_clock(schedule, read)
    assert all(message.received.start >= message.sent.end - 1e-6 for message in message_timings(schedule, mended))
    assert stage_times([mended]) == pytest.approx(stage_times([batch]))


@dataclass
class StreamEvent:
    """An event that a device has passed at this time."""

    time: float = 0.0

    def record(self) -> None:
        """Recorded when it was made."""

    def synchronize(self) -> None:
        """Passed already."""

    def elapsed_time(self, end_event: "StreamEvent") -> float:
        return 1e3 * (end_event.time - self.time)


def test_times_on_one_machine_stay_as_they_are() -> None:
    schedule = build("hanayo", num_ranks=4, num_microbatches=4)
    batch = simulated_batch(schedule, COSTS)
    assert on_one_clock(schedule, batch) == batch
    alone = build("1f1b", num_ranks=1, num_microbatches=2)
    assert on_one_clock(alone, simulated_batch(alone, COSTS)) == simulated_batch(alone, COSTS)
