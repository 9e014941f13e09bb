"""The closed forms on the pages equal the simulator's results."""

import pytest

from lightning_hanayo.schedule import CostModel, build, simulate
from recipes.paper import closed_form
from recipes.paper.closed_form import Times
from recipes.paper.contender import OURS, SPLIT, WHOLE, Contender, measure

TIMES = [Times(), Times(message=0.1), Times(1.0, 1.5, 0.05), Times(2.0, 4.0, 0.03)]


def makespan(name: str, num_ranks: int, times: Times, num_waves: int = 1) -> float:
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_ranks, num_waves=num_waves)
    half = times.backward / 2
    return simulate(schedule, CostModel(times.forward, half, half, times.message)).makespan


@pytest.mark.parametrize("times", TIMES, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_makespans_with_messages(num_ranks: int, times: Times) -> None:
    assert makespan("gpipe", num_ranks, times) == pytest.approx(closed_form.gpipe(num_ranks, times))
    assert makespan("1f1b", num_ranks, times) == pytest.approx(closed_form.dapple(num_ranks, times))
    for waves in (1, 2, 8):
        wave = closed_form.hanayo(num_ranks, waves, times)
        assert makespan("hanayo", num_ranks, times, waves) == pytest.approx(wave)


@pytest.mark.parametrize("contender", (*WHOLE, *SPLIT, *OURS), ids=lambda one: one.label)
def test_idle_times_of_the_schedules_page(contender: Contender) -> None:
    forms = 0
    for num_ranks, num_microbatches in ((3, 9), (4, 4), (4, 16), (8, 8), (8, 16)):
        if contender.name == "chimera" and num_ranks % 2:
            continue
        bubble = closed_form.idle_ratio(contender, num_ranks, num_microbatches)
        if bubble is not None:
            forms += 1
            assert measure(contender, num_ranks, num_microbatches).bubble == pytest.approx(bubble)
    assert forms >= 3
