"""dualpipev."""

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Action, Schedule, build, simulate
from tests.schedule.torch_orders import torch_order

SIZES = [(ranks, count) for ranks in (1, 2, 3, 4, 5, 8) for count in range(2 * ranks, 4 * ranks + 1, max(1, ranks - 1))]


def cells(schedule: Schedule) -> list[list[str]]:
    """Our rows, written as torch writes its own."""
    seconds = set(schedule.partner_of.values())

    def text(action: Action) -> str:
        partner = schedule.partner_of.get(action)
        return str(action) if partner is None else f"({action};{partner})OVERLAP_F_B"

    return [[text(action) for action in row if action not in seconds] for row in schedule.actions]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_it_is_the_order_torch_generates(num_ranks: int, num_microbatches: int) -> None:
    schedule = build("dualpipev", num_ranks=num_ranks, num_microbatches=num_microbatches)
    assert cells(schedule) == torch_order("ScheduleDualPipeV", num_ranks, num_microbatches, 2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_pairs_that_hide_nothing_idle_twice_as_long_as_zbv(num_ranks: int) -> None:
    for num_microbatches in (2 * num_ranks, 2 * num_ranks + 1, 5 * num_ranks):
        timeline = simulate(build("dualpipev", num_ranks=num_ranks, num_microbatches=num_microbatches))
        assert timeline.makespan == pytest.approx(3 * num_microbatches + num_ranks - 1)


def test_it_holds_half_a_micro_batch_more_than_zbv() -> None:
    for num_ranks in (2, 4, 8):
        peaks = simulate(build("dualpipev", num_ranks=num_ranks, num_microbatches=3 * num_ranks)).peak_activations
        assert max(peaks) == num_ranks + 0.5


def test_too_few_micro_batches() -> None:
    with pytest.raises(ValueError, match="at least as many microbatches as stages"):
        torch_order("ScheduleDualPipeV", 4, 7, 2)
    with pytest.raises(HanayoError, match="at least one micro-batch per stage, 8 on 4 ranks, got 7"):
        build("dualpipev", num_ranks=4, num_microbatches=7)


@pytest.mark.parametrize("wrong", [{"num_waves": 2}, {"num_stages_per_rank": 3}])
def test_one_wave_only(wrong: dict[str, int]) -> None:
    with pytest.raises(HanayoError, match="dualpipev"):
        build("dualpipev", num_ranks=2, num_microbatches=4, **wrong)  # type: ignore[arg-type]
