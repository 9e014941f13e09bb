"""The loss stage and the forward-only schedule."""

import pytest
from hypothesis import given

from lightning_hanayo.schedule import (
    CostModel,
    Kind,
    Schedule,
    build,
    forward_only,
    simulate,
    validate,
    with_loss_stage,
)
from tests.schedule.samples import NAMES, make, row, schedules, unhurried


def test_head_and_loss_run_on_rank_0_after_the_last_stage() -> None:
    schedule = with_loss_stage(build("1f1b", num_ranks=4, num_microbatches=4))
    assert schedule.loss_stage
    assert schedule.stage_ranks == (0, 1, 2, 3, 0)
    assert schedule.actions[0] == row("0F0 0F1 0F2 0F3 4F0 4B0 4F1 4B1 4F2 4B2 0B0 4F3 4B3 0B1 0B2 0B3")
    assert schedule.actions[1:] == build("1f1b", num_ranks=4, num_microbatches=4).actions[1:]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_wave_has_its_loss_on_rank_0_already(num_ranks: int) -> None:
    schedule = make("hanayo", num_ranks, 4, 2)
    assert with_loss_stage(schedule) is schedule


def test_a_second_loss_stage_is_not_added() -> None:
    schedule = with_loss_stage(build("gpipe", num_ranks=2, num_microbatches=2))
    assert with_loss_stage(schedule) is schedule


def test_a_single_stage_gets_one() -> None:
    schedule = with_loss_stage(build("gpipe", num_ranks=1, num_microbatches=2))
    assert schedule.stage_ranks == (0, 0)
    assert schedule.actions[0] == row("0F0 1F0 1B0 0F1 1F1 1B1 0B0 0B1")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", range(1, 7))
def test_it_is_valid_everywhere(name: str, num_ranks: int) -> None:
    for num_microbatches in (1, num_ranks, 2 * num_ranks + 1):
        schedule = with_loss_stage(make(name, num_ranks, num_microbatches, 2))
        validate(schedule)
        assert schedule.stage_ranks[-1] == 0
        loss = schedule.num_stages - 1
        place = {
            (action.kind, action.microbatch): at
            for at, action in enumerate(schedule.actions[0])
            if action.stage == loss
        }
        backward = Kind.B if (Kind.B, 0) in place else Kind.I
        assert all(place[Kind.F, m] < place[backward, m] for m in range(num_microbatches))


def test_it_costs_no_time_and_no_activations_of_its_own() -> None:
    plain = build("gpipe", num_ranks=4, num_microbatches=8)
    timeline = simulate(with_loss_stage(plain))
    assert timeline.makespan == simulate(plain).makespan
    assert timeline.peak_activations == simulate(plain).peak_activations


def test_the_loss_stage_may_have_a_cost() -> None:
    schedule = with_loss_stage(build("gpipe", num_ranks=2, num_microbatches=1))
    dear = CostModel(forward=(1.0, 1.0, 0.5), backward_input=(1.0, 1.0, 0.25), backward_weight=(1.0, 1.0, 0.25))
    assert simulate(schedule, dear).makespan == pytest.approx(6 + 1)


@given(schedules())
@unhurried
def test_forward_only_keeps_the_order(schedule: Schedule) -> None:
    forward = forward_only(schedule)
    validate(forward)
    for kept, actions in zip(forward.actions, schedule.actions, strict=True):
        assert kept == tuple(action for action in actions if action.kind is Kind.F)


def test_forward_only_may_get_its_loss_later() -> None:
    schedule = with_loss_stage(forward_only(build("1f1b", num_ranks=2, num_microbatches=3)))
    validate(schedule)
    assert schedule.actions[0] == row("0F0 0F1 2F0 0F2 2F1 2F2")


@given(schedules(max_ranks=4, max_microbatches=6))
@unhurried
def test_losses_never_come_between_the_actions_of_a_pair(schedule: Schedule) -> None:
    extended = with_loss_stage(schedule)
    validate(extended)
    assert extended.pairs == schedule.pairs
