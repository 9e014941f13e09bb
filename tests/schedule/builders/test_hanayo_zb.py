"""hanayo-zb: its lower bound and memory, and that no other schedule of the same depth and memory is faster."""

from collections.abc import Callable, Iterator
from math import inf, nan
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import CostModel, Kind, Schedule, Timeline, build, simulate, validate
from lightning_hanayo.schedule.search.evaluator import SchedulingProblem
from lightning_hanayo.schedule.search.search import ListScheduler, lower_bounds
from lightning_hanayo.schedule.table import loop, zigzag
from tests.harness.thorough import covered
from tests.schedule.drawing import drawn
from tests.schedule.samples import unhurried

Sizes = tuple[int, int, int]
"""P, W, B"""

EFFORT = "lightning_hanayo.schedule.search.search.EFFORT"


def ours(sizes: Sizes, costs: CostModel | None = None, budget: float | None = None) -> Timeline:
    return simulate(wave("hanayo-zb", sizes, costs, budget), costs)


def wave(name: str, sizes: Sizes, costs: CostModel | None = None, budget: float | None = None) -> Schedule:
    num_ranks, num_waves, num_microbatches = sizes
    return build(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_waves=num_waves,
        costs=costs,
        activation_budget=budget,
    )


def peer(name: str, num_ranks: int, num_microbatches: int) -> Timeline:
    return simulate(build(name, num_ranks=num_ranks, num_microbatches=num_microbatches))


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small part of the search."""
    monkeypatch.setattr(EFFORT, 40_000)


@pytest.fixture
def without_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first order only (and, for one wave, those of zbv, v-half and v-min)."""
    monkeypatch.setattr(EFFORT, 0)


def test_the_picture() -> None:
    assert drawn(wave("hanayo-zb", (2, 1, 2))) == [
        "F00 F01 ... F10 I10 F11 I11 I00 W10 I01 W11 W00 W01",
        "... F00 F10 F01 F11 I10 I00 I11 I01 W10 W11 W00 W01",
    ]


# Even stages, F = I = W


RANKS_AND_GROUPS = [(p, groups) for p in (2, 4, 8, 16) for groups in (1, 2, 4, 8) if p * groups <= 64]


@pytest.mark.parametrize(
    ("num_ranks", "groups"), covered(RANKS_AND_GROUPS, by=[(2, 1), (2, 8), (4, 1), (4, 2), (8, 1), (8, 4), (16, 1)])
)
@pytest.mark.parametrize("num_waves", [1, 2, 4])
def test_it_meets_the_lower_bound(num_ranks: int, num_waves: int, groups: int) -> None:
    """B (T_F + T_B) + (P-1) T_F / 2W: the last rank can't start earlier."""
    num_microbatches = groups * num_ranks
    timeline = ours((num_ranks, num_waves, num_microbatches))
    assert timeline.makespan == pytest.approx(3 * num_microbatches + (num_ranks - 1) / (2 * num_waves), abs=1e-9)
    assert max(timeline.peak_activations) <= num_ranks


@pytest.mark.parametrize("message", [0.02, 0.05])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.usefixtures("without_search")
def test_the_closed_form_with_messages(num_ranks: int, groups: int, message: float) -> None:
    """The first order reaches it."""
    costs = CostModel(message=message)
    for num_waves in (2, 3, 4):
        idle = 1 / (2 * num_waves) + (2 * num_waves + 1) * message
        timeline = ours((num_ranks, num_waves, groups * num_ranks), costs)
        assert timeline.makespan == pytest.approx(3 * groups * num_ranks + (num_ranks - 1) * idle, abs=1e-9)


@pytest.mark.usefixtures("in_a_hurry")
def test_any_number_of_micro_batches() -> None:
    """P = 4, W = 2. With more than P micro-batches a step takes hardly longer than its work."""
    makespans = [ours((4, 2, num_microbatches)).makespan for num_microbatches in range(1, 12)]
    assert makespans == sorted(makespans)
    for num_microbatches, makespan in enumerate(makespans, 1):
        least = 3 * num_microbatches + 3 / 4
        assert makespan >= least - 1e-9
        if num_microbatches > 4:
            assert makespan <= 1.02 * least


@pytest.mark.parametrize("num_waves", [1, 2, 3])
def test_one_rank_never_idles(num_waves: int) -> None:
    timeline = ours((1, num_waves, 5))
    assert timeline.makespan == pytest.approx(15)
    assert timeline.peak_activations == (1,)


def test_the_search_ends_where_both_bounds_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of one step and of a step that follows others."""
    runs = []
    run = ListScheduler.run

    def counted(self: ListScheduler, limit: float = inf) -> float:
        runs.append(self)
        return run(self, limit)

    monkeypatch.setattr(ListScheduler, "run", counted)
    wave("hanayo-zb", (8, 2, 32))
    assert len(runs) <= 20


# Messages and uneven stages: beside the others with as many stages per rank


Costs = Callable[[tuple[int, ...]], CostModel]
"""The costs of a placement's stages; by default a rank's share costs 1 for each of F, I and W."""


def even(message: float) -> Costs:
    return lambda _: CostModel(message=message)


def slow_stage(stage: int, message: float) -> Costs:
    """One stage takes 1.5 times as long."""
    return lambda ranks: _uneven(ranks, [1.5 if one == stage else 1.0 for one in range(len(ranks))], message)


def slow_rank(message: float) -> Costs:
    """The stages of rank 0 take 1.3 times as long."""
    return lambda ranks: _uneven(ranks, [1.3 if rank == 0 else 1.0 for rank in ranks], message)


def _uneven(stage_ranks: tuple[int, ...], factors: list[float], message: float) -> CostModel:
    times = tuple(factor / stage_ranks.count(0) for factor in factors)
    return CostModel(times, times, times, message=message)


def peers(sizes: Sizes, costs: Costs) -> Iterator[tuple[str, Timeline]]:
    """All other schedules of the same depth that hold at most P M_a."""
    num_ranks, num_waves, num_microbatches = sizes
    looped = loop(num_ranks, 2 * num_waves)
    for name in ("interleaved", "interleaved-zb"):
        table = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_stages_per_rank=2 * num_waves)
        yield name, simulate(table, costs(looped))
    zigzagged = costs(zigzag(num_ranks, num_waves))
    yield "hanayo", simulate(wave("hanayo", sizes, zigzagged), zigzagged)
    for name in ("zbv", "v-half", "v-min") if num_waves == 1 else ():
        yield name, simulate(wave(name, sizes), zigzagged)


def fastest(sizes: Sizes, costs: Costs) -> float:
    inside = [one.makespan for _, one in peers(sizes, costs) if max(one.peak_activations) <= sizes[0] + 1e-9]
    return min(inside)


SIZES = [(2, 2, 4), (4, 1, 8), (4, 2, 8), (8, 2, 16), (8, 4, 8)]
COSTS = {
    "hop 0.02": even(0.02),
    "hop 0.05": even(0.05),
    "hop 0.1": even(0.1),
    "slow first": slow_stage(0, 0.0),
    "slow second": slow_stage(1, 0.05),
    "slow rank": slow_rank(0.05),
}


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.usefixtures("without_search")
def test_no_schedule_of_its_depth_and_memory_is_faster(sizes: Sizes, costs: Costs) -> None:
    """Its first orders are enough here; the search can only find faster ones."""
    timeline = ours(sizes, costs(zigzag(*sizes[:2])))
    assert timeline.makespan <= fastest(sizes, costs) + 1e-9
    assert max(timeline.peak_activations) <= sizes[0]


@pytest.mark.usefixtures("in_a_hurry")
def test_searching_helps() -> None:
    """Where the first orders are slower than interleaved-zb."""
    sizes, costs = (8, 2, 16), slow_rank(0.0)
    assert ours(sizes, costs(zigzag(8, 2))).makespan <= fastest(sizes, costs) + 1e-9


def test_a_loop_can_be_faster_with_a_slow_turning_stage() -> None:
    """P = 4. In one wave stage 4 is on rank 3, which can't start before three stages have run. In a loop it is on
    rank 0, which starts at once.

    wave   3 stages, then 8 (3 + 0.75)         loop   8 (3 + 0.75), and then the last rank's end
    """
    sizes, costs = (4, 1, 8), slow_stage(4, 0.0)
    least = bound(sizes, costs(zigzag(4, 1)))
    assert least == 3 / 2 + 8 * 3.75
    assert fastest(sizes, costs) == 30.75
    assert ours(sizes, costs(zigzag(4, 1))).makespan == pytest.approx(least)


def bound(sizes: Sizes, costs: CostModel, budget: float = inf) -> float:
    num_ranks, num_waves, num_microbatches = sizes
    shape = Schedule("shape", zigzag(num_ranks, num_waves), ((),) * num_ranks, num_microbatches)
    return lower_bounds(SchedulingProblem.of(shape, costs, budget))[0]


def test_the_lower_bound_with_messages_and_a_slow_stage() -> None:
    """Rank 1 starts a stage and a message after rank 0; the slow stage is 0 (on rank 0) or 1."""
    assert bound((2, 1, 4), CostModel(message=0.1)) == pytest.approx(12 + 0.5 + 0.1)
    assert bound((2, 1, 4), slow_stage(0, 0.1)((0, 1, 1, 0))) == pytest.approx(max(15, 12 + 0.75 + 0.1))
    assert bound((2, 1, 4), slow_stage(1, 0.1)((0, 1, 1, 0))) == pytest.approx(15 + 0.5 + 0.1)


# Less memory


@pytest.mark.parametrize("sizes", [(4, 1, 8), (4, 2, 8), (8, 2, 16)], ids=str)
def test_three_quarters_of_the_memory_idle_no_longer_than_zb_h1(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    num_ranks, _, num_microbatches = sizes
    monkeypatch.setattr(EFFORT, 150_000 if num_ranks > 4 else 40_000)
    timeline = ours(sizes, budget=0.75 * num_ranks)
    assert timeline.makespan <= peer("zb-h1", num_ranks, num_microbatches).makespan
    assert max(timeline.peak_activations) <= 0.75 * num_ranks


def test_half_of_the_memory_idles_no_longer_than_v_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """v-half holds P/2 + 1."""
    monkeypatch.setattr(EFFORT, 150_000)
    half = peer("v-half", 8, 16)
    timeline = ours((8, 2, 16), budget=4)
    assert (max(timeline.peak_activations), max(half.peak_activations)) == (4, 5)
    assert timeline.makespan <= half.makespan


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.usefixtures("without_search")
def test_one_wave_is_never_slower_than_v_half_and_v_min_in_their_memory(num_ranks: int, name: str) -> None:
    other = peer(name, num_ranks, 2 * num_ranks)
    timeline = ours((num_ranks, 1, 2 * num_ranks), budget=max(other.peak_activations))
    assert timeline.makespan <= other.makespan


@pytest.mark.usefixtures("in_a_hurry")
@pytest.mark.parametrize("num_waves", [1, 2])
def test_more_memory_is_never_slower(num_waves: int) -> None:
    makespans = [ours((4, num_waves, 8), budget=budget).makespan for budget in (1, 2, 3, 4, 6)]
    assert makespans == sorted(makespans, reverse=True)


# Whatever is asked for


@st.composite
def requests(draw: st.DrawFn) -> tuple[Sizes, CostModel, float]:
    sizes = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    num_stages = 2 * sizes[0] * sizes[1]
    cost = st.sampled_from([0.0, 0.25, 1.0, 2.5])
    costs = st.one_of(cost, st.tuples(*[cost] * num_stages))
    message = draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    return (
        sizes,
        CostModel(draw(costs), draw(costs), draw(costs), message=message),
        draw(st.floats(1, sizes[0] + 1) | st.just(inf)),
    )


@given(requests())
@unhurried
def test_valid_within_its_budget_and_the_same_again(asked: tuple[Sizes, CostModel, float]) -> None:
    sizes, costs, budget = asked
    with patch(EFFORT, 2_000):
        first, again = (wave("hanayo-zb", sizes, costs, budget) for _ in range(2))
    assert first == again
    validate(first)
    assert {action.kind for actions in first.actions for action in actions} == {Kind.F, Kind.I, Kind.W}
    timeline = simulate(first, costs)
    assert max(timeline.peak_activations) <= budget + 1e-6
    assert timeline.makespan >= bound(sizes, costs) - 1e-9


@pytest.mark.parametrize("budget", [0.99, 0, -1, nan])
def test_less_than_one_micro_batch_is_no_budget(budget: float) -> None:
    with pytest.raises(HanayoError, match=r"'hanayo-zb': activation_budget=.*, expected (at least 1|a number above 0)"):
        wave("hanayo-zb", (4, 1, 4), budget=budget)


def test_waves_fix_the_stages_per_rank() -> None:
    with pytest.raises(HanayoError, match="has 4 stages per rank here, got num_stages_per_rank=2"):
        build("hanayo-zb", num_ranks=2, num_microbatches=2, num_waves=2, num_stages_per_rank=2)


@pytest.mark.parametrize("sizes", [(4, 2, 8), (2, 2, 4)])
def test_steady_steps_add_less_though_the_first_may_take_longer(sizes: Sizes) -> None:
    costs = CostModel(message=0.01)
    num_ranks, num_waves, num_microbatches = sizes
    single, steady = (
        simulate(
            build("hanayo-zb", num_ranks=num_ranks, num_microbatches=num_microbatches, num_waves=num_waves, costs=costs,
                  steady=steady),
            costs,
            steps=4,
        )
        for steady in (False, True)
    )  # fmt: skip
    assert single.step_times[0] <= steady.step_times[0] + 1e-9
    assert steady.step_times[-1] <= single.step_times[-1] + 1e-9
    assert steady.step_times[-1] <= 3 * num_microbatches * 1.01, "what a rank computes, and hardly more"
    assert max(steady.peak_activations) <= num_ranks


SIZES_EXPOSED = [((2, 2, 4), 0.25), ((4, 2, 8), 0.25), ((8, 2, 16), 0.25), ((4, 4, 8), 0.15)]


@pytest.mark.parametrize(("sizes", "exposed"), SIZES_EXPOSED)
def test_only_the_last_stages_reduction_is_exposed(sizes: Sizes, exposed: float) -> None:
    """Summing gradients over data ranks takes a tenth of the compute. Only that of the last of 2W stages is exposed."""
    reduce = 0.1 * 3 * sizes[2]
    schedule = wave("hanayo-zb", sizes)
    step, longer = simulate(schedule), simulate(schedule, CostModel(gradient_reduce=reduce))
    assert longer.makespan - step.makespan <= exposed * reduce + 1e-9
