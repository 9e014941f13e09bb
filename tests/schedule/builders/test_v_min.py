"""v-min, beside the figures its authors print."""

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import CostModel, build, simulate
from tests.schedule.drawing import drawn
from tests.schedule.samples import make


def test_four_ranks() -> None:
    schedule = make("v-min", 4, 2)
    assert schedule.stage_ranks == (0, 1, 2, 3, 3, 2, 1, 0)
    assert drawn(schedule) == [
        "F00 F01 ... ... ... ... ... F10 I10 F11 I11 W10 W11 ... ... I00 W00 I01 W01",
        "... F00 F01 ... ... ... F10 ... F11 I10 W10 I11 W11 ... I00 W00 I01 W01 ...",
        "... ... F00 F01 ... F10 ... F11 ... ... I10 W10 I11 I00 W11 I01 W00 W01 ...",
        "... ... ... F00 F10 F01 F11 ... ... ... ... I10 I00 I11 I01 W10 W00 W11 W01",
    ]


def idle(num_ranks: int) -> float:
    """In T_F, once there are P micro-batches."""
    if num_ranks <= 2:
        return (num_ranks - 1) / 2
    return 2 * num_ranks - (3.5, 2.5, 4.5)[num_ranks % 3]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16])
def test_the_printed_peak_and_bubble(num_ranks: int) -> None:
    for num_microbatches in sorted({1, 2, num_ranks, num_ranks + 1, 2 * num_ranks}):
        timeline = simulate(make("v-min", num_ranks, num_microbatches))
        assert max(timeline.peak_activations) == min(num_microbatches, (num_ranks + 4) // 3)
        if num_microbatches >= num_ranks:
            waits = timeline.makespan - 3 * num_microbatches
            assert waits == idle(num_ranks)
            assert waits / (3 * num_microbatches) <= 2 * num_ranks / (3 * num_microbatches)  # printed: about 2p/3m


@pytest.mark.parametrize("num_ranks", [4, 5, 6])
def test_unequal_costs_slow_every_period(num_ranks: int) -> None:
    for costs, slow in ((1.0, 1.0, 1.0), False), ((1.0, 1.2, 0.8), True), ((1.2, 1.0, 1.0), True):
        few, many = (
            simulate(make("v-min", num_ranks, count * num_ranks), CostModel(*costs)).makespan for count in (4, 6)
        )
        assert (many - few > 2 * num_ranks * sum(costs) + 1e-6) == slow


@pytest.mark.parametrize("wrong", [{"num_waves": 2}, {"num_stages_per_rank": 1}])
def test_one_v_only(wrong: dict[str, int]) -> None:
    with pytest.raises(HanayoError, match="v-min"):
        build("v-min", num_ranks=2, num_microbatches=2, **wrong)  # type: ignore[arg-type]
