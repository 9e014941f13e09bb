"""v-half and v-min, compared with the figures their authors print."""

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import CostModel, build, simulate
from tests.schedule.drawing import drawn
from tests.schedule.samples import make

RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16]


def test_v_half_on_three_ranks() -> None:
    schedule = make("v-half", 3, 3)
    assert schedule.stage_ranks == (0, 1, 2, 2, 1, 0)
    assert drawn(schedule) == [
        "F00 F01 F02 ... ... F10 I10 W10 ... ... F11 I11 I00 W11 W00 F12 I12 I01 W12 W01 ... I02 W02",
        "... F00 F01 F02 F10 ... ... I10 W10 F11 I00 W00 I11 W11 F12 ... I01 I12 W01 W12 I02 W02 ...",
        "... ... F00 F10 F01 F11 ... ... I10 I00 W10 F02 W00 F12 I11 I01 W11 W01 I12 I02 W12 W02 ...",
    ]


def test_v_min_on_four_ranks() -> None:
    schedule = make("v-min", 4, 2)
    assert schedule.stage_ranks == (0, 1, 2, 3, 3, 2, 1, 0)
    assert drawn(schedule) == [
        "F00 F01 ... ... ... ... ... F10 I10 F11 I11 W10 W11 ... ... I00 W00 I01 W01",
        "... F00 F01 ... ... ... F10 ... F11 I10 W10 I11 W11 ... I00 W00 I01 W01 ...",
        "... ... F00 F01 ... F10 ... F11 ... ... I10 W10 I11 I00 W11 I01 W00 W01 ...",
        "... ... ... F00 F10 F01 F11 ... ... ... ... I10 I00 I11 I01 W10 W00 W11 W01",
    ]


def idle(name: str, num_ranks: int) -> float:
    """In T_F, once there are P micro-batches."""
    if num_ranks <= 2:
        return (num_ranks - 1) / 2
    if name == "v-half":
        return 1.5 * num_ranks - (3.5 if num_ranks % 2 == 0 else 2)
    return 2 * num_ranks - (3.5, 2.5, 4.5)[num_ranks % 3]


def peak(name: str, num_ranks: int) -> int:
    """In M_a, once there are as many micro-batches."""
    return (num_ranks + 2) // 2 if name == "v-half" else (num_ranks + 4) // 3


PRINTED = [("v-half", 1 / 2), ("v-min", 2 / 3)]
"""about p/2m and 2p/3m"""


@pytest.mark.parametrize(("name", "printed"), PRINTED)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_the_printed_peak_and_bubble(num_ranks: int, name: str, printed: float) -> None:
    for num_microbatches in sorted({1, 2, num_ranks, num_ranks + 1, 2 * num_ranks}):
        timeline = simulate(make(name, num_ranks, num_microbatches))
        assert max(timeline.peak_activations) == min(num_microbatches, peak(name, num_ranks))
        if num_microbatches >= num_ranks:
            waits = timeline.makespan - 3 * num_microbatches
            assert waits == idle(name, num_ranks)
            assert waits / (3 * num_microbatches) <= printed * num_ranks / num_microbatches


@pytest.mark.parametrize("costs", [(1, 1.2, 0.8), (1, 1.4, 0.8), (1, 1.5, 0.5), (1.5, 1, 0.5), (1, 2, 1), (1.2, 1, 1)])
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_under_which_costs_v_half_has_no_gap_in_its_steady_state(
    num_ranks: int, costs: tuple[float, float, float]
) -> None:
    """There a further micro-batch adds only its work."""
    forward, backward, weight = costs
    few, many = (
        simulate(make("v-half", num_ranks, count * num_ranks), CostModel(*costs)).makespan / num_ranks
        for count in (4, 6)
    )
    printed = weight + 2 * backward >= 2 * forward and weight + 2 * forward >= 2 * backward
    assert (many - few == pytest.approx(2 * sum(costs))) == printed


@pytest.mark.parametrize("num_ranks", [4, 5, 6])
def test_unequal_costs_slow_every_period_of_v_min(num_ranks: int) -> None:
    for costs, slow in ((1.0, 1.0, 1.0), False), ((1.0, 1.2, 0.8), True), ((1.2, 1.0, 1.0), True):
        few, many = (
            simulate(make("v-min", num_ranks, count * num_ranks), CostModel(*costs)).makespan for count in (4, 6)
        )
        assert (many - few > 2 * num_ranks * sum(costs) + 1e-6) == slow


def test_v_half_trades_idle_time_for_memory() -> None:
    half, whole = (simulate(make(name, 8, 32)) for name in ("v-half", "zbv"))
    assert (max(half.peak_activations), max(whole.peak_activations)) == (5, 8)
    assert half.makespan - whole.makespan == 5


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("wrong", [{"num_waves": 2}, {"num_stages_per_rank": 1}])
def test_there_is_only_one_v(name: str, wrong: dict[str, int]) -> None:
    with pytest.raises(HanayoError, match=name):
        build(name, num_ranks=2, num_microbatches=2, **wrong)  # type: ignore[arg-type]
