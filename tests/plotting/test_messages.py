"""Messages and idle time, read off a timeline."""

from hypothesis import given

from lightning_hanayo.plotting.messages import idle_before, messages
from lightning_hanayo.schedule import CostModel, Schedule, build, simulate
from lightning_hanayo.schedule.simulation.comparison import messages_per_microbatch
from tests.schedule.samples import schedules, unhurried


def test_of_a_pipeline_of_two() -> None:
    """rank 0  0F0 ........ 0B0
    rank 1      1F0 1B0
    """
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=1), CostModel(message=0.5))
    ways = [(str(one.producer.action), str(one.consumer.action)) for one in messages(timeline)]
    assert sorted(ways) == [("0F0", "1F0"), ("1B0", "0B0")]
    idle = {str(span.action): wait for span, wait in idle_before(timeline).items()}
    assert idle == {"0F0": 0.0, "1F0": 1.5, "1B0": 0.0, "0B0": 4.0}


@unhurried
@given(schedules())
def test_each_leaves_before_it_arrives_and_all_are_counted(schedule: Schedule) -> None:
    timeline = simulate(schedule, CostModel(message=0.25), steps=2)
    found = list(messages(timeline))
    assert len(found) == 2 * schedule.num_microbatches * messages_per_microbatch(schedule)
    for one in found:
        assert one.producer.rank != one.consumer.rank
        assert one.consumer.start >= one.producer.end + 0.25 - 1e-9


@unhurried
@given(schedules())
def test_idle_and_busy_make_up_the_time_until_the_last_action(schedule: Schedule) -> None:
    timeline = simulate(schedule, CostModel(message=0.25))
    idle = idle_before(timeline)
    for rank in range(schedule.num_ranks):
        spans = [span for span in timeline.spans if span.rank == rank]
        assert abs(sum(idle[s] + s.end - s.start for s in spans) - max(s.end for s in spans)) < 1e-9
