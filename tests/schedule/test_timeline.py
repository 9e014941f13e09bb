"""Timelines, simulated or measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.schedule import (
    Action,
    CostModel,
    Kind,
    Schedule,
    Span,
    Timeline,
    build,
    forward_only,
    simulate,
    with_loss_stage,
)
from tests.schedule.samples import schedules, table, unhurried


def spans(*texts: str) -> tuple[Span, ...]:
    """`"0 0F0 1.0 2.0"`: rank, action, start, end."""
    parts = [text.split() for text in texts]
    return tuple(Span(int(rank), Action.parse(cell), float(start), float(end)) for rank, cell, start, end in parts)


def test_a_measured_timeline_counts_from_its_first_start() -> None:
    timeline = Timeline(spans("0 0F0 10 11", "1 1F0 11 13", "1 1B0 13 14", "0 0B0 14 16"))
    assert (timeline.num_ranks, timeline.begin, timeline.makespan) == (2, 10, 6)
    assert timeline.busy == (3, 3)
    assert timeline.bubble_ratio == pytest.approx(0.5)
    assert timeline.peak_activations == (1, 1)


def test_no_spans_at_all() -> None:
    timeline = Timeline(())
    assert (timeline.num_ranks, timeline.makespan, timeline.bubble_ratio, timeline.peak_activations) == (0, 0, 0, ())


def test_communication_is_not_busy_time() -> None:
    timeline = Timeline(spans("0 0F0 0 1", "0 0SEND_F0 1 2", "0 0REDUCE_GRAD 2 4"))
    assert timeline.busy == (1,)
    assert timeline.bubble_ratio == 0.75


def test_an_activation_lives_until_its_weight_gradient() -> None:
    whole = table("0F0 0B0 0F1 0B1", stage_ranks=(0,), num_microbatches=2)
    assert simulate(whole).peak_activations == (1,)
    late = table("0F0 0I0 0F1 0W0 0I1 0W1", stage_ranks=(0,), num_microbatches=2)
    assert simulate(late).peak_activations == (2,)


def test_the_loss_stage_holds_none() -> None:
    schedule = with_loss_stage(build("1f1b", num_ranks=2, num_microbatches=4))
    assert simulate(schedule).peak_activations == (2, 1)


def test_without_shares_a_ranks_stages_count_alike() -> None:
    timeline = simulate(build("hanayo", num_ranks=4, num_microbatches=4, num_waves=2))
    assert Timeline(timeline.spans).peak_activations == timeline.peak_activations


def test_activations_over_time() -> None:
    r"""P = 2, 1F1B, B = 2, T_B = 2:

    rank 0  F0 F1 .  b0 b0 . b1 b1        holds  0 1 2 2 2 1 1 1 0
    rank 1  .  F0 b0 b0 F1 b1 b1          holds  0 1 1 1 1 1 1 0
    """
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2))
    assert timeline.activations(0) == ((0, 1), (1, 2), (6, 1), (9, 0))
    assert timeline.activations(1) == ((0, 0), (1, 1), (4, 1), (7, 0))
    assert timeline.held(0, (10.0, 0.0)) == ((0, 10), (1, 20), (6, 10), (9, 0))


@given(schedules(), st.integers(1, 2))
@unhurried
def test_activations_are_those_between_their_forward_and_their_backward(schedule: Schedule, steps: int) -> None:
    """At each change, compared with the definition: from the start of `F` to the end of `B` or `W`, per step."""
    timeline = simulate(schedule, CostModel(message=0.1), steps)
    lives: dict[int, list[tuple[float, float, float]]] = {rank: [] for rank in range(schedule.num_ranks)}
    for step in timeline.steps:
        begins = {(s.action.stage, s.action.microbatch): s.start for s in step.spans if s.action.kind is Kind.F}
        for s in step.spans:
            if s.action.kind in (Kind.B, Kind.W):
                share = schedule.share_of(s.action.stage)
                lives[s.rank].append((begins[s.action.stage, s.action.microbatch], s.end, share))
    for rank in range(schedule.num_ranks):
        curve = timeline.activations(rank)
        times = [time for time, _ in curve]
        assert times == sorted(set(times))
        assert [sum(share for a, b, share in lives[rank] if a <= time < b) for time in times] == pytest.approx(
            [held for _, held in curve], abs=1e-9
        )
        assert max(held for _, held in curve) == timeline.peak_activations[rank]
        assert curve[-1][1] == 0


def test_steps_one_by_one() -> None:
    """P = 2 and forward only: a step fills the pipeline (3 + 1), others start while it drains (3 each, no bubble)."""
    timeline = simulate(forward_only(build("gpipe", num_ranks=2, num_microbatches=3)), steps=3)
    assert [(step.begin, step.makespan) for step in timeline.steps] == [(0, 4), (3, 4), (6, 4)]
    assert timeline.step_times == (4, 3, 3)
    assert timeline.step_bubbles == (0.25, 0, 0)
    assert timeline.steps[0] == simulate(forward_only(build("gpipe", num_ranks=2, num_microbatches=3)))
