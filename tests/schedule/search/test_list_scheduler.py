"""The list scheduler: it follows the plan while it can, and fills gaps.

plan     0F0 0F1 0I0 0F2 ...       0I0 hasn't arrived yet: 0F2, a weight gradient, or nothing
                ^ gap
"""

from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.schedule import CostModel, Schedule, simulate, validate
from lightning_hanayo.schedule.search.evaluator import Evaluator, SchedulingProblem
from lightning_hanayo.schedule.search.search import FillPolicy, ListScheduler
from lightning_hanayo.schedule.table import zigzag
from tests.schedule.samples import row, unhurried

EVEN = CostModel(1, 1, 1)
HERE = "0F0 0F1 0I0 0F2 0I1 0F3 0I2 0I3"
THERE = "1F0 1I0 1F1 1I1 1F2 1I2 1F3 1I3"


def run(
    here: str, there: str, policy: FillPolicy | None = None, costs: CostModel = EVEN, budget: float = 9
) -> list[str]:
    """The rows that two ranks with a stage each run; the plan and the result are written like a table."""
    shape = Schedule("line", (0, 1), ((), ()), here.count("0F"))
    evaluator = Evaluator(shape, costs)
    scheduler = ListScheduler(
        SchedulingProblem.of(shape, costs, budget), evaluator.encode([row(here), row(there)]), policy or FillPolicy()
    )
    scheduler.run()
    return [" ".join(map(str, actions)) for actions in evaluator.decode(scheduler.rows)]


def test_weight_gradients_fill_the_gaps() -> None:
    """0I0 comes at 3, 0F1 ends at 2, and 0F2 waits for its turn.

    rank 0   F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
    rank 1      F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
    """
    assert run(HERE, THERE) == [
        "0F0 0F1 0I0 0F2 0I1 0F3 0I2 0W0 0I3 0W1 0W2 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1F3 1I3 1W0 1W1 1W2 1W3",
    ]


@pytest.mark.parametrize(("reach", "ran"), [(0, "0F0 0I0"), (2, "0F0 0I0"), (3, "0F0 0F1"), (inf, "0F0 0F1")])
def test_reach(reach: float, ran: str) -> None:
    """While 0I0, at position 1, has not arrived, 0F1 waits at position 4."""
    assert run("0F0 0I0 0I1 0I2 0F1 0F2 0I3 0F3", THERE, FillPolicy(reach))[0].startswith(ran)


@pytest.mark.parametrize(("weights_first", "ran"), [(False, "0F2"), (True, "0W0")])
def test_a_gap_is_filled_from_ahead_or_by_a_weight_gradient(weights_first: bool, ran: str) -> None:
    """0I0 ends at 4, 0I1 comes at 5."""
    here, _ = run("0F0 0F1 0I0 0I1 0F2 0I2", "1F0 1I0 1F1 1I1 1F2 1I2", FillPolicy(1, 0, weights_first))
    assert here.startswith(f"0F0 0F1 0I0 {ran} 0I1")


@pytest.mark.parametrize(("tolerance", "ran"), [(0, "0F2 0I0"), (0.4, "0F2 0I0"), (0.6, "0I0 0F2"), (1, "0I0 0F2")])
def test_tolerance(tolerance: float, ran: str) -> None:
    """The gap is half as long as 0F2: 0F1 ends at 2, 0I0 comes at 2.5."""
    here, _ = run(HERE, THERE, FillPolicy(1, tolerance), CostModel((1, 0.5), 1, 1))
    assert here.startswith(f"0F0 0F1 {ran}")


def test_planned_weight_gradients_keep_their_place() -> None:
    here, there = "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"
    assert run(here, there) == [here, there]
    assert run("0F0 0F1 0I0 0I1", "1F0 1I0 1F1 1I1")[1] == "1F0 1I0 1F1 1I1 1W0 1W1"


def test_reach_is_lifted_where_all_ranks_wait() -> None:
    """There is no memory for 0F1, and 0I0 is beyond the reach: only lifting the reach helps."""
    assert run("0F0 0F1 0I0 0I1", "1F0 1F1 1I0 1I1", budget=1) == [
        "0F0 0I0 0W0 0F1 0I1 0W1",
        "1F0 1I0 1W0 1F1 1I1 1W1",
    ]


def test_time_advances_where_all_ranks_wait() -> None:
    """There is no memory for 0F1 until 0W0, and 0I0, ready at 7, is beyond the reach: nothing starts before 7."""
    costs = CostModel(1, 1, 1, message=2)
    shape = Schedule("line", (0, 1), ((), ()), 2)
    evaluator = Evaluator(shape, costs)
    plan = [row("0F0 0F1 0I0 0I1"), row("1F0 1I0 1F1 1I1")]
    scheduler = ListScheduler(SchedulingProblem.of(shape, costs, 1), evaluator.encode(plan), FillPolicy(reach=0))
    assert scheduler.run() == pytest.approx(evaluator.makespan(scheduler.rows))


def test_a_problem() -> None:
    shape = Schedule("v", zigzag(2, 1), ((), ()), 3)
    costs = CostModel(forward=(1, 2, 3, 4), backward_input=6, backward_weight=2, message=0.1)
    problem = SchedulingProblem.of(shape, costs, budget=1.5)
    assert problem.times == ((1.0, 2.0, 3.0, 4.0), (3.0,) * 4, (1.0,) * 4)
    assert problem.hops == (0.1, 0.0, 0.1)
    assert (problem.num_ranks, problem.num_stages, problem.capacity, problem.num_actions) == (2, 4, 3, 36)
    whole = SchedulingProblem.of(shape, costs, budget=inf, split=False)
    assert (whole.times[1], whole.capacity, whole.num_actions) == ((4.0,) * 4, 6, 24)


def test_rows_in_the_order_of_their_keys() -> None:
    problem = SchedulingProblem.of(Schedule("v", (0, 1), ((), ()), 2), EVEN, 2)
    assert problem.rows([0, 1, 1, 2, 5, 5, 4, 3]) == [[0, 1, 4, 5], [2, 3, 7, 6]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Schedule, CostModel, float]:
    num_ranks, num_waves = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    shape = Schedule("any", zigzag(num_ranks, num_waves), ((),) * num_ranks, draw(st.integers(1, 6)))
    cost = st.sampled_from([0, 0.25, 1, 1.5])
    stages = st.tuples(*[cost] * shape.num_stages)
    costs = CostModel(draw(stages), draw(stages), draw(stages), message=draw(st.sampled_from([0, 0.125, 1])))
    return shape, costs, draw(st.sampled_from([1, 1.3, 1.5, 2, 3, 7]))


policies = st.builds(FillPolicy, st.sampled_from([0, 1, 3, inf]), st.sampled_from([0, 0.5, 1]), st.booleans())


@given(problems(), policies, st.booleans(), st.randoms(use_true_random=False))
@unhurried
def test_any_plan_ends_within_its_capacity(
    sizes: tuple[Schedule, CostModel, float], policy: FillPolicy, weights: bool, random: Random
) -> None:
    """Where all ranks waited for actions beyond their reach, the table may be faster than the scheduler was."""
    shape, costs, budget = sizes
    problem, evaluator = SchedulingProblem.of(shape, costs, budget), Evaluator(shape, costs)
    num_planned = problem.num_actions if weights else problem.num_actions // 3 * 2
    plan = problem.rows([random.random() for _ in range(num_planned)])
    scheduler = ListScheduler(problem, plan, policy)
    makespan = scheduler.run()
    table = Schedule("any", shape.stage_ranks, evaluator.decode(scheduler.rows), shape.num_microbatches)
    validate(table)
    timeline = simulate(table, costs)
    assert max(timeline.peak_activations) <= budget + 1e-6
    assert timeline.makespan <= makespan + 1e-6
