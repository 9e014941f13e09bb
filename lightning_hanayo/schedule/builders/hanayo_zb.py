"""hanayo-zb: wave schedules with the backward split, optimized for any W, B, costs and activation budget.

Forwards and input gradients keep the order that forwards and whole backwards have in `hanayo`. Weight gradients, which
no other rank waits for, fill the gaps:

    P = 2, W = 1     rank 0   F0 F1 .  F0 I0 F1 I1 I0 W0 I1 ...          B = 2: only the gaps marked . are left,
                     rank 1   .  F0 F0 F1 F1 I0 I0 I1 I1 W0 ...          where nothing can be ready yet

For even stages with T_F = T_I = T_W, a budget of P M_a and B a multiple of P the makespan is

    B (T_F + T_B) + (P-1) (T_F / 2W + (2W+1) T_C)         for T_C = 0; with W of at least 2 up to T_C = 0.05 T_F

At T_C = 0 that is the lower bound of any schedule with this placement: the last rank can't start earlier. With messages
one wave may take a little longer, and so may several waves for larger T_C.

For other costs, uneven stages or a smaller budget the order is searched, and the best simulated one is taken:

    1  the wave's order with several fill policies; for W = 1 also the orders of zbv, v-half and v-min
    2  patterns, if the budget is below P M_a
    3  changes to the best order so far: some actions a little earlier or later
"""

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush, nsmallest
from itertools import islice, product
from math import inf
from operator import itemgetter
from random import Random

from lightning_hanayo.schedule.builders.hanayo import budget_of, paper_order, wave_orders
from lightning_hanayo.schedule.builders.v_schedules import v_half, v_min, zbv
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule
from lightning_hanayo.schedule.search.evaluator import Evaluator
from lightning_hanayo.schedule.search.list_scheduler import FillPolicy, ListScheduler
from lightning_hanayo.schedule.search.problem import SchedulingProblem
from lightning_hanayo.schedule.search.search import Pattern, Pauses, Search
from lightning_hanayo.schedule.table import Kind, zigzag


@register_schedule("hanayo-zb", depth="waves")
def hanayo_zb(request: Request) -> Schedule:
    """The best order found within the budget (default P); the search ends early if the lower bound is reached."""
    budget = budget_of(request)
    costs = request.costs or CostModel()
    placement = zigzag(request.num_ranks, request.num_waves)
    shape = Schedule(request.name, placement, ((),) * request.num_ranks, request.num_microbatches)
    evaluator = Evaluator(shape, costs)
    if request.forwards_first:
        budget = request.num_microbatches
    problem = SchedulingProblem.of(shape, costs, budget, forwards_first=request.forwards_first)
    search = Search(problem, evaluator, steady=request.steady)
    if request.num_waves == 1 and not request.forwards_first:
        for builder in (zbv, v_half, v_min):
            search.try_order(evaluator.encode(builder(request).actions))
    tight = budget < request.num_ranks
    if request.steady and any(search.problem.hops):  # steps in the order for free messages follow without a gap
        free = replace(costs, message=0.0, message_between_nodes=None, ranks_per_node=None)
        search.try_order(evaluator.encode(hanayo_zb(replace(request, costs=free)).actions))
    reserve = search.actions_left // 2 if tight else 0
    search.try_plans(_wave_plans(shape, request.num_waves, costs, budget), until=reserve)
    if tight:
        search.try_plans(_pattern_plans(search.problem, search.effort), until=-inf)
    search.improve()
    return replace(shape, actions=evaluator.decode(_weights_by_stage(search.best, search.problem)))


def _weights_by_stage(rows: list[list[int]], problem: SchedulingProblem) -> list[list[int]]:
    """The same order, but wherever a rank runs a W, it is that of the highest stage whose I is done. So this stage's
    gradients are complete as early as possible, and their reduction overlaps with the rest.

        W3 W0 W3 W0   ->   W3 W3 W0 W0          both reduced after the last W  ->  stage 3 after the second one

    A rank's row is unchanged if the W of its stages take different times.
    """
    microbatches, kind = problem.num_microbatches, problem.num_stages * problem.num_microbatches
    for rank, row in enumerate(rows):
        if len({time for home, time in zip(problem.stage_ranks, problem.times[2], strict=True) if home == rank}) > 1:
            continue
        waiting: list[tuple[int, int, int]] = []
        for place, code in enumerate(row):
            if code >= 2 * kind:
                row[place] = heappop(waiting)[2]
            elif code >= kind:
                stage, microbatch = divmod(code - kind, microbatches)
                heappush(waiting, (-stage, microbatch, code + kind))
    return rows


def _wave_plans(
    shape: Schedule, num_waves: int, costs: CostModel, budget: float
) -> Iterator[tuple[list[list[int]], FillPolicy]]:
    """The paper's order, then the orders of `hanayo` within P M_a (or a smaller budget), then within a larger one."""
    orders = []
    if shape.num_microbatches <= shape.num_ranks:
        paper = paper_order(shape.name, shape.num_ranks, num_waves, shape.num_microbatches)
        split = ([replace(one, kind=Kind.F if one.kind is Kind.F else Kind.I) for one in row] for row in paper.actions)
        orders.append(Evaluator(shape, costs).encode(split))
        yield orders[0], FillPolicy()
    for limit in dict.fromkeys((min(budget, shape.num_ranks), budget)):
        for order in wave_orders(shape, num_waves, costs, limit):
            orders.append(order)
            yield order, FillPolicy()
    one_microbatch = 4 * num_waves  # the F and I of one micro-batch on a rank
    for tolerance, weights_first in product((0.0, 0.5, 1.0), (False, True)):
        for reach, order in product((2 * one_microbatch, one_microbatch, one_microbatch // 2, inf), orders[:2]):
            yield order, FillPolicy(reach, tolerance, weights_first)


def _pattern_plans(problem: SchedulingProblem, effort: int) -> Iterator[tuple[list[list[int]], FillPolicy]]:
    """The patterns that are fastest for fewer micro-batches, the best first."""
    trial = replace(problem, num_microbatches=min(problem.num_microbatches, 2 * problem.num_ranks))
    stages_per_rank = problem.stage_ranks.count(0)
    policies = (FillPolicy(reach=2 * stages_per_rank), FillPolicy(weights_first=True))
    count = max(effort // 2, min(4 * effort, 120 * trial.num_actions)) // trial.num_actions
    random = Random(0)
    drawn = (Pattern(problem.stage_ranks, _pauses(random, stages_per_rank)) for _ in range(1000))
    patterns = list({one.cells: one for one in drawn}.values())
    # first those without idle cells whose peak is closest to the capacity
    patterns.sort(key=lambda one: (one.period, abs(one.peak - problem.capacity), one.latency))
    tries = islice(product(patterns, (False, True), policies), count)
    results = []
    for pattern, weights, policy in tries:
        plan = trial.rows(pattern.keys(trial.num_microbatches, weights))
        results.append((ListScheduler(trial, plan, policy).run(), pattern, weights, policy))
    for _, pattern, weights, policy in nsmallest(8, results, key=itemgetter(0)):
        yield problem.rows(pattern.keys(problem.num_microbatches, weights)), policy


def _pauses(random: Random, stages_per_rank: int) -> Pauses:
    down, up, back_down, back_up = (random.choice((0, 0, 0, 0, 1, 1, 2, 3)) for _ in range(4))
    turn = random.choice((0, 0, 0, 1, 2, 3, stages_per_rank))
    weights = random.choice((0, 0, 0, 1, 2, stages_per_rank))
    return Pauses(down, up, back_down, back_up, turn, weights, period=random.choice((0, 0, 0, 1, 2)))
