"""Messages and idle time are derived from a timeline."""

from hypothesis import given

from lightning_hanayo.plotting.timeline import idle_before, timeline_messages
from lightning_hanayo.schedule import CostModel, Schedule, build, simulate
from lightning_hanayo.schedule.communication import messages_per_microbatch
from tests.schedule.samples import schedules, unhurried


def test_messages_and_idle_time_of_two_ranks() -> None:
    """rank 0  0F0 ........ 0B0
    rank 1      1F0 1B0
    """
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=1), CostModel(message=0.5))
    pairs = [(str(producer.action), str(consumer.action)) for producer, consumer in timeline_messages(timeline)]
    assert sorted(pairs) == [("0F0", "1F0"), ("1B0", "0B0")]
    idle = {str(span.action): wait for span, wait in idle_before(timeline).items()}
    assert idle == {"0F0": 0.0, "1F0": 1.5, "1B0": 0.0, "0B0": 4.0}


@unhurried
@given(schedules(pairs=False))
def test_messages_are_sent_before_they_arrive_and_none_is_missing(schedule: Schedule) -> None:
    timeline = simulate(schedule, CostModel(message=0.25), steps=2)
    found = list(timeline_messages(timeline))
    assert len(found) == 2 * schedule.num_microbatches * messages_per_microbatch(schedule)
    for producer, consumer in found:
        assert producer.rank != consumer.rank
        assert consumer.start >= producer.end + 0.25 - 1e-9


@unhurried
@given(schedules(pairs=False))
def test_idle_and_busy_time_add_up_to_the_end_of_the_last_action(schedule: Schedule) -> None:
    timeline = simulate(schedule, CostModel(message=0.25))
    idle = idle_before(timeline)
    for rank in range(schedule.num_ranks):
        spans = [span for span in timeline.spans if span.rank == rank]
        assert abs(sum(idle[s] + s.end - s.start for s in spans) - max(s.end for s in spans)) < 1e-9
