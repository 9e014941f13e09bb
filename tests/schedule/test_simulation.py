"""The simulation."""

import pytest
from hypothesis import given

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Action, CostModel, Kind, Schedule, build, forward_only, simulate
from lightning_hanayo.schedule.dependency import waits_in
from tests.schedule.samples import make, schedules, table, unhurried


def test_a_message_delays_its_receiver_and_nobody_else() -> None:
    """rank 0: 0F0 at 0..1, 0F1 at 1..2; the message of the first arrives at 1.5."""
    timeline = simulate(build("gpipe", num_ranks=2, num_microbatches=2), CostModel(message=0.5))
    starts = {str(span.action): span.start for span in timeline.spans}
    assert (starts["0F1"], starts["1F0"], starts["1F1"]) == (1.0, 1.5, 2.5)


@given(schedules())
@unhurried
def test_everything_runs_once_in_order_and_after_what_it_waits_for(schedule: Schedule) -> None:
    timeline = simulate(schedule, CostModel(message=0.1))
    span_of = {span.action: span for span in timeline.spans}
    waits = waits_in(schedule.actions, schedule.num_stages, schedule.num_microbatches)
    for rank, actions in enumerate(schedule.actions):
        end = 0.0
        for action in actions:
            span = span_of[action]
            assert span.rank == rank
            assert span.start >= end - 1e-9
            assert all(span.start >= span_of[other].end - 1e-9 for other in waits[action])
            end = span.end


@given(schedules())
@unhurried
def test_a_rank_is_busy_for_its_work(schedule: Schedule) -> None:
    timeline = simulate(schedule)
    assert timeline.busy == pytest.approx((3.0 * schedule.num_microbatches,) * schedule.num_ranks)
    assert 0 <= timeline.bubble_ratio + 1e-9 < 1


def test_steps_follow_each_other_without_a_barrier() -> None:
    """Rank 0 starts the second step while the last rank still works on the first."""
    schedule = forward_only(make("gpipe", 4, 4))
    one, three = simulate(schedule), simulate(schedule, steps=3)
    assert len(three.spans) == 3 * len(one.spans)
    assert (one.makespan, three.makespan) == (4 + 3, 3 * 4 + 3)


def test_reductions_lie_beside_the_compute() -> None:
    """P = 1, two stages: stage 1's reduction lies beside stage 0's last backward; stage 0's ends the step."""
    schedule = build("hanayo", num_ranks=1, num_microbatches=1)
    timeline = simulate(schedule, CostModel(gradient_reduce=4.0), steps=2)
    reductions = [
        (span.action.stage, span.start, span.end) for span in timeline.spans if span.action.kind is Kind.REDUCE_GRAD
    ]
    assert reductions[:2] == [(1, 2.0, 4.0), (0, 4.0, 6.0)]
    second = [span for span in timeline.spans if span.action == Action(0, Kind.F, 0)][1]
    assert second.start == 6.0
    assert timeline.busy == (6.0,)


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(HanayoError, match="wait for each other"):
        simulate(table("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", stage_ranks=(0, 1), num_microbatches=2))
