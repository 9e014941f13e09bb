"""The simulation."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Action, CostModel, Kind, Schedule, build, forward_only, simulate
from tests.schedule.message_rule import table_waits
from tests.schedule.samples import make, schedules, table, unhurried

times = st.integers(0, 64).map(lambda count: count / 32)
"""times whose sums are exact"""


def test_a_message_delays_only_its_receiver() -> None:
    """rank 0: 0F0 at 0..1, 0F1 at 1..2; the message of the first arrives at 1.5."""
    timeline = simulate(build("gpipe", num_ranks=2, num_microbatches=2), CostModel(message=0.5))
    starts = {str(span.action): span.start for span in timeline.spans}
    assert (starts["0F1"], starts["1F0"], starts["1F1"]) == (1.0, 1.5, 2.5)


@given(schedules(pairs=False), times, times, times, times)
@unhurried
def test_no_action_could_start_earlier_or_later(
    schedule: Schedule, forward: float, backward_input: float, backward_weight: float, message: float
) -> None:
    """Each start is the rank's last end or an arrival, whichever is later; on a rank nothing overlaps."""
    costs = CostModel(forward, backward_input, backward_weight, message)
    timeline = simulate(schedule, costs)
    span_of = {span.action: span for span in timeline.spans}
    waits = table_waits(schedule)
    assert len(span_of) == len(timeline.spans) == sum(map(len, schedule.actions))
    for rank, actions in enumerate(schedule.actions):
        free = 0.0
        for action in actions:
            span, sources = span_of[action], [span_of[other] for other in waits[action]]
            arrivals = [source.end + (message if source.rank != rank else 0.0) for source in sources]
            assert (span.rank, span.start) == (rank, max([free, *arrivals]))
            free = span.end
            assert free == span.start + costs.of(schedule, action)


@given(schedules(pairs=False), times, times, times, times)
@unhurried
def test_a_step_takes_its_busiest_ranks_work_and_one_micro_batchs_latency(
    schedule: Schedule, forward: float, backward_input: float, backward_weight: float, message: float
) -> None:
    timeline = simulate(schedule, CostModel(forward, backward_input, backward_weight, message))
    stages = range(schedule.num_stages)
    chain = sum((forward + backward_input) * schedule.share_of(stage) for stage in stages)
    hops = sum(schedule.stage_ranks[a] != schedule.stage_ranks[b] for a, b in pairwise(stages))
    assert timeline.makespan >= max(timeline.busy) - 1e-9
    assert timeline.makespan >= chain + 2 * hops * message - 1e-9


@given(st.integers(2, 9), st.sampled_from([1, 2, 4]), times, times, st.integers(0, 4))
@unhurried
def test_the_closed_forms_hold_to_the_last_bit(
    num_ranks: int, depth: int, forward: float, more: float, sixteenths: int
) -> None:
    """Times are multiples of a power of two, so that sums are exact. T_B is at least T_F, a message at most T_F / 4."""
    backward, message = forward + more, forward * sixteenths / 16
    costs = CostModel(forward, backward / 2, backward / 2, message)
    both = forward + backward
    hops = {
        "gpipe": 2 * num_ranks - 2,
        "1f1b": 4 * num_ranks - 6,
        "interleaved": 2 * (num_ranks * depth - 1),
        "hanayo": 4 * depth * (num_ranks - 1) + 2 * (num_ranks - 2),
    }
    idle = {"interleaved": both / depth, "hanayo": max(forward, backward) / depth}
    for name in hops:
        wanted = num_ranks * both + (num_ranks - 1) * idle.get(name, both) + hops[name] * message
        assert simulate(make(name, num_ranks, num_ranks, depth), costs).makespan == wanted, name


@given(st.integers(2, 8), st.integers(1, 8), st.integers(1, 8))
@unhurried
def test_the_closed_form_of_gpipe_with_hops_by_node(num_ranks: int, num_microbatches: int, ranks_per_node: int) -> None:
    """(P + B - 1) (T_F + T_B), and each hop twice."""
    costs = CostModel(message=0.125, message_between_nodes=0.5, ranks_per_node=ranks_per_node)
    between = (num_ranks - 1) // ranks_per_node
    hops = 0.5 * between + 0.125 * (num_ranks - 1 - between)
    timeline = simulate(make("gpipe", num_ranks, num_microbatches), costs)
    assert timeline.makespan == (num_ranks + num_microbatches - 1) * 3 + 2 * hops


@given(schedules())
@unhurried
def test_everything_runs_once_in_order_and_after_what_it_waits_for(schedule: Schedule) -> None:
    timeline = simulate(schedule, CostModel(message=0.1))
    span_of = {span.action: span for span in timeline.spans}
    waits, seconds = table_waits(schedule), set(schedule.partner_of.values())
    for rank, actions in enumerate(schedule.actions):
        end = 0.0
        for action in actions:
            span = span_of[action]
            assert span.rank == rank
            assert span.start >= end - 1e-9 or action in seconds
            assert all(span.start >= span_of[other].end - 1e-9 for other in waits[action])
            end = max(end, span.end)


@given(schedules())
@unhurried
def test_a_rank_is_busy_for_its_work(schedule: Schedule) -> None:
    timeline = simulate(schedule)
    assert timeline.busy == pytest.approx((3.0 * schedule.num_microbatches,) * schedule.num_ranks)
    assert 0 <= timeline.bubble_ratio + 1e-9 < 1


@pytest.mark.parametrize("steps", [0, 1.5, "2"])
def test_steps_are_a_whole_number(steps: int) -> None:
    with pytest.raises(HanayoError, match="steps=.*, expected at least 1"):
        simulate(make("gpipe", 2, 2), steps=steps)


def test_steps_follow_each_other_without_a_barrier() -> None:
    """Rank 0 starts the second step while the last rank still works on the first."""
    schedule = forward_only(make("gpipe", 4, 4))
    one, three = simulate(schedule), simulate(schedule, steps=3)
    assert len(three.spans) == 3 * len(one.spans)
    assert (one.makespan, three.makespan) == (4 + 3, 3 * 4 + 3)


@given(schedules(max_ranks=4, max_microbatches=5), times, times)
@unhurried
def test_a_step_starts_when_its_ranks_own_work_is_done(schedule: Schedule, message: float, reduce: float) -> None:
    costs = CostModel(message=message, gradient_reduce=reduce)
    three, two, one = (simulate(schedule, costs, steps) for steps in (3, 2, 1))
    assert three.steps[:2] == two.steps
    assert two.steps[0] == one
    assert one.makespan <= two.makespan <= three.makespan <= 3 * one.makespan + 1e-9
    assert sum(three.step_times) == pytest.approx(three.makespan)
    assert all(time >= max(one.busy) - 1e-9 for time in three.step_times)
    for step, following in pairwise(three.steps):
        for rank in range(schedule.num_ranks):
            last = max(span.end for span in step.spans if span.rank == rank)
            assert all(span.start >= last for span in following.spans if span.rank == rank)


def test_steps_of_a_wave_overlap_fully_and_those_of_a_loop_do_not() -> None:
    r"""P = 4, B = 8. The ranks of a zbv end in the order in which they begin, so the next step fits right after
    it; those of a loop all wait for the first rank's last action.

    zbv   \ step 0 \ step 1 \        interleaved-zb   \ step 0 | \ step 1 |
           \        \        \                         \       |  \       |
    """
    bubbles = {
        (name, depth): simulate(make(name, 4, 8, depth), steps=4).step_bubbles
        for name, depth in (("zbv", 1), ("interleaved-zb", 2), ("interleaved-zb", 4))
    }
    assert bubbles["zbv", 1] == pytest.approx((1 / 17, 0, 0, 0))
    assert bubbles["interleaved-zb", 2] == pytest.approx((1 / 17,) * 4)
    assert bubbles["interleaved-zb", 4] == pytest.approx((1 / 33,) * 4)


def test_steps_of_two_waves_with_a_split_backward_overlap_fully() -> None:
    """Steps of a wave with whole backwards don't."""
    whole = make("hanayo", 4, 8, 2)
    split = build("hanayo-zb", num_ranks=4, num_microbatches=8, num_waves=2)
    assert simulate(whole, steps=3).step_bubbles == pytest.approx((1 / 9,) * 3)
    assert simulate(split, steps=3).step_bubbles == pytest.approx((1 / 33, 0, 0))


def test_steps_with_the_overhead_of_a_runtime() -> None:
    """The measured 7.6 % of zbv alone and 3.9 % back to back (P = 4, B = 8): three steps, 0.0095 T_F on each action."""
    schedule = make("zbv", 4, 8)
    each = (0.5 + 0.0095,) * 8
    timeline = simulate(schedule, CostModel(each, each, each), steps=3)
    work = 3 * 8
    assert 1 - work / timeline.steps[0].makespan == pytest.approx(0.076, abs=1e-3)
    assert 1 - 3 * work / timeline.makespan == pytest.approx(0.039, abs=1e-3)
    loop = simulate(make("interleaved-zb", 4, 8, 2), CostModel(each, each, each), steps=3)
    assert loop.step_times == pytest.approx((loop.steps[0].makespan,) * 3)


def test_reductions_overlap_with_compute() -> None:
    """P = 1, two stages: stage 1's reduction overlaps with stage 0's last backward; stage 0's ends the step."""
    schedule = build("hanayo", num_ranks=1, num_microbatches=1)
    timeline = simulate(schedule, CostModel(gradient_reduce=4.0), steps=2)
    reductions = [
        (span.action.stage, span.start, span.end) for span in timeline.spans if span.action.kind is Kind.REDUCE_GRAD
    ]
    assert reductions[:2] == [(1, 2.0, 4.0), (0, 4.0, 6.0)]
    second = [span for span in timeline.spans if span.action == Action(0, Kind.F, 0)][1]
    assert second.start == 6.0
    assert timeline.busy == (6.0,)


def test_a_table_that_deadlocks_is_rejected() -> None:
    with pytest.raises(HanayoError, match="wait for each other"):
        simulate(table("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", stage_ranks=(0, 1), num_microbatches=2))


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (("0F0 0B0", "1F1 1B1"), "no micro-batch 1"),
        (("0F0 0B0", "2F0 2B0"), "no stage 2"),
        (("0F0 0B0 1F0 1B0", ""), "both claim stage 1"),
        (("0F0 0B0", "1F0 1B0 1SEND_B0"), "is communication"),
        (("0F0 0B0", "1F0"), "no whole backward"),
    ],
)
def test_an_invalid_table_is_rejected(rows: tuple[str, ...], why: str) -> None:
    with pytest.raises(HanayoError, match=why):
        simulate(table(*rows, stage_ranks=(0, 1), num_microbatches=1))


def test_no_step_at_all() -> None:
    with pytest.raises(HanayoError, match="steps=0, expected at least 1"):
        simulate(make("gpipe", 2, 2), steps=0)
