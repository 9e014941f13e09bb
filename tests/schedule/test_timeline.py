"""Timelines, simulated or measured."""

import json

import pytest
from hypothesis import given

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Action, CostModel, Schedule, Span, Timeline, build, simulate, with_loss_stage
from tests.schedule.samples import schedules, split, table, unhurried


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


def test_communication_keeps_nobody_busy() -> None:
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


@given(schedules())
@unhurried
def test_json_and_back(schedule: Schedule) -> None:
    timeline = simulate(split(schedule), CostModel(message=0.1, gradient_reduce=1.0))
    again = Timeline.from_json(timeline.to_json())
    assert again == timeline
    told = json.loads(timeline.to_json())
    assert told["makespan"] == again.makespan
    assert tuple(told["peak_activations"]) == again.peak_activations


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"spans": [{"rank": 0}]}', '{"spans": 3}', '{"spans": [{"rank": 0, "action": 3}]}']
)
def test_what_is_no_timeline_is_refused(text: str) -> None:
    with pytest.raises(HanayoError, match="this is no timeline"):
        Timeline.from_json(text)
