"""chimera: the paper's figure, its bubble ratios, and what follows from two replicas.

rank 0   F0 .  F1 f2 b2 f3 b3 B0 .  B1
rank 1      F0 f2 F1 f3 b2 B0 b3 B1
rank 2      f2 F0 f3 F1 B0 b2 B1 b3
rank 3   f2 .  f3 F0 B0 F1 B1 b2 .  b3
"""

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import CostModel, Kind, Schedule, build, simulate, validate, with_loss_stage
from tests.schedule.samples import row, table


def chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    return build("chimera", num_ranks=num_ranks, num_microbatches=num_microbatches)


def test_the_figure() -> None:
    schedule = chimera(4, 4)
    assert schedule.actions == (
        row("0F0 0F1 7F2 7B2 7F3 7B3 0B0 0B1"),
        row("1F0 6F2 1F1 6F3 6B2 1B0 6B3 1B1"),
        row("5F2 2F0 5F3 2F1 2B0 5B2 2B1 5B3"),
        row("4F2 4F3 3F0 3B0 3F1 3B1 4B2 4B3"),
    )
    assert schedule.stage_ranks == (0, 1, 2, 3, 3, 2, 1, 0)
    assert schedule.replica_of == (4, 5, 6, 7, 0, 1, 2, 3)


def test_many_micro_batches_go_on_in_the_same_slots() -> None:
    assert chimera(4, 8).actions[1] == row("1F0 6F2 1F1 6F3 6B2 1F4 1B0 6F6 6B3 1F5 1B1 6F7 6B6 1B4 6B7 1B5")


@pytest.mark.parametrize(("num_ranks", "bubble"), [(8, 0.3333), (32, 0.3846)])
def test_the_bubbles_hanayo_prints_for_it(num_ranks: int, bubble: float) -> None:
    assert simulate(chimera(num_ranks, num_ranks)).bubble_ratio == pytest.approx(bubble, abs=5e-5)


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("backward", [0.5, 1.0, 2.0, 3.0])
def test_the_closed_form(num_ranks: int, backward: float) -> None:
    for num_microbatches in (num_ranks, num_ranks + 2, 2 * num_ranks, 5 * num_ranks - 2):
        timeline = simulate(chimera(num_ranks, num_microbatches), CostModel(1.0, backward / 2, backward / 2))
        idle = (num_ranks - 2) * max(1.0, backward)
        assert timeline.makespan == pytest.approx(num_microbatches * (1.0 + backward) + idle)


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 8, 16])
def test_messages_on_the_longest_way(num_ranks: int) -> None:
    """Hanayo's formula for chimera has 3P - 2 of them at B = P; the order has three fewer."""
    for num_microbatches in (num_ranks, 2 * num_ranks, 4 * num_ranks):
        schedule = chimera(num_ranks, num_microbatches)
        dearer = simulate(schedule, CostModel(message=0.01)).makespan - simulate(schedule).makespan
        messages = 3 * num_ranks - 4 - (num_microbatches == num_ranks)
        assert dearer == pytest.approx(max(messages, 2) * 0.01)


@pytest.mark.parametrize("num_microbatches", [3, 5, 7, 9, 11])
def test_an_odd_number_costs_no_more_than_the_even_one_above(num_microbatches: int) -> None:
    assert simulate(chimera(4, num_microbatches)).makespan <= simulate(chimera(4, num_microbatches + 1)).makespan


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("units", [1, 2, 5])
def test_activations_from_half_of_the_ranks_to_all(num_ranks: int, units: int) -> None:
    peak = simulate(chimera(num_ranks, units * num_ranks)).peak_activations
    half = [num_ranks // 2 + 1 + rank for rank in range(num_ranks // 2)]
    assert peak == ((*half, *half[::-1]) if units == 1 else (num_ranks,) * num_ranks)


@pytest.mark.parametrize("num_microbatches", range(1, 12))
def test_any_number_of_micro_batches_half_of_them_each_way(num_microbatches: int) -> None:
    schedule = chimera(4, num_microbatches)
    ups = {a.microbatch for actions in schedule.actions for a in actions if a.stage >= 4}
    assert num_microbatches // 2 == len(ups)
    assert simulate(schedule).busy == (3.0 * num_microbatches,) * 4
    assert max(simulate(schedule).peak_activations) <= 4


def test_a_stage_is_a_whole_share_and_a_rank_holds_two() -> None:
    schedule = chimera(4, 4)
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert {schedule.share_of(stage) for stage in range(8)} == {1.0}
    assert CostModel().of(schedule, schedule.actions[0][0]) == 1.0


def test_unsupported_requests_are_rejected() -> None:
    with pytest.raises(HanayoError, match="even number of ranks.*num_ranks=3; take 4"):
        chimera(3, 4)
    with pytest.raises(HanayoError, match="no waves"):
        build("chimera", num_ranks=4, num_microbatches=4, num_waves=2)
    with pytest.raises(HanayoError, match="2 stages per rank"):
        build("chimera", num_ranks=4, num_microbatches=4, num_stages_per_rank=4)
    with pytest.raises(HanayoError, match="losses on two ranks, 3 and 0"):
        with_loss_stage(chimera(4, 4))
    with pytest.raises(HanayoError, match="holds 4 M_a"):
        build("chimera", num_ranks=4, num_microbatches=4, activation_budget=3)


def test_a_micro_batch_on_both_replicas_is_rejected() -> None:
    both = table("0F0 0B0 3F1 3B1", "2F1 2B1 1F0 1B0 2F0", stage_ranks=(0, 1, 1, 0), num_microbatches=2)
    with pytest.raises(HanayoError) as error:
        validate(Schedule(both.name, both.stage_ranks, both.actions, 2, replica_of=(2, 3, 0, 1)))
    assert "2F0: micro-batch 0 also visits stage 0 of the other replica" in str(error.value)
    assert "[2F0]" in str(error.value)


def test_a_micro_batch_visits_every_stage_of_its_replica() -> None:
    half = table("0F0 0B0 3F1 3B1", "2F1 2B1 1F0", stage_ranks=(0, 1, 1, 0), num_microbatches=2)
    with pytest.raises(HanayoError, match="stage 1 has no whole backward of micro-batch 0"):
        validate(Schedule(half.name, half.stage_ranks, half.actions, 2, replica_of=(2, 3, 0, 1)))
    lost = table("0F0 0B0 3F1 3B1", "2F1 2B1 1F0 1B0", stage_ranks=(0, 1, 1, 0), num_microbatches=3)
    with pytest.raises(HanayoError, match="no forward of micro-batch 2"):
        validate(Schedule(lost.name, lost.stage_ranks, lost.actions, 3, replica_of=(2, 3, 0, 1)))


def test_twins_are_half_of_the_stages_apart() -> None:
    schedule = chimera(2, 2)
    with pytest.raises(HanayoError, match=r"replica_of=\(1, 0, 3, 2\), expected .* \(2, 3, 0, 1\)"):
        validate(Schedule("mine", schedule.stage_ranks, schedule.actions, 2, replica_of=(1, 0, 3, 2)))


def test_all_backwards_are_whole() -> None:
    assert {a.kind for actions in chimera(4, 6).actions for a in actions} == {Kind.F, Kind.B}
