"""hanayo-zb: waves with the backward split in input and weight gradient, for any W, B, costs and activation budget.

Forwards and input gradients keep the order that forwards and whole backwards have in `hanayo`; weight gradients, for
which nobody waits, fill the holes:

    P = 2, W = 1     rank 0   F0 F1 .  F0 I0 F1 I1 I0 W0 I1 ...          B = 2: . is the only hole left, as nothing
                     rank 1   .  F0 F0 F1 F1 I0 I0 I1 I1 W0 ...          can be there yet

For even stages with T_F = T_I = T_W, a budget of P M_a and B a multiple of P the makespan is

    B (T_F + T_B) + (P-1) (T_F / 2W + (2W+1) T_C)         for T_C = 0; with W of at least 2 up to T_C = 0.05 T_F

At T_C = 0 that is the lower bound of any schedule on this placement: the last rank can't start earlier. With messages
one wave may take a little longer, as many waves do where T_C is larger.

What else costs, stages or a smaller budget ask for is found by search, and the best order simulated wins:

    1  the wave's order, holes filled in several manners; for W = 1 also the orders of zbv, v-half and v-min
    2  patterns, where the budget is below P M_a
    3  changes to the best so far: some actions a little earlier or later, played again
"""

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush, nsmallest
from itertools import islice, product
from math import inf
from operator import itemgetter
from random import Random

from lightning_hanayo.schedule.action import Kind
from lightning_hanayo.schedule.builders.hanayo import budget_of, paper_order, wave_orders
from lightning_hanayo.schedule.builders.v_half import v_half
from lightning_hanayo.schedule.builders.v_min import v_min
from lightning_hanayo.schedule.builders.zbv import zbv
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.placement import zigzag
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.search.evaluator import Evaluator
from lightning_hanayo.schedule.search.list_scheduler import FillPolicy, Job, ListScheduler
from lightning_hanayo.schedule.search.pattern import Pattern, Pauses
from lightning_hanayo.schedule.search.search import Search
from lightning_hanayo.schedule.table import Schedule


@register_schedule("hanayo-zb", depth="waves")
def hanayo_zb(request: Request) -> Schedule:
    """The best order found within the budget (default P); the search ends early where the lower bound is met."""
    budget = budget_of(request)
    costs = request.costs or CostModel()
    placement = zigzag(request.num_ranks, request.num_waves)
    shape = Schedule(request.name, placement, ((),) * request.num_ranks, request.num_microbatches)
    search = Search(Job.of(shape, costs, budget), Evaluator(shape, costs), steady=request.steady)
    if request.num_waves == 1:
        for peer in (zbv, v_half, v_min):
            search.take(search.compiled.rows(peer(request).actions))
    tight = budget < request.num_ranks
    if request.steady and any(search.job.hops):  # the order for free messages follows itself without a gap
        free = replace(costs, message=0.0, message_between_nodes=None, ranks_per_node=None)
        search.take(search.compiled.rows(hanayo_zb(replace(request, costs=free)).actions))
    search.along(_waves(shape, request.num_waves, costs, budget), until=search.left // 2 if tight else 0)
    if tight:
        search.along(_patterns(search.job, search.effort), until=-inf)
    search.improve()
    return replace(shape, actions=search.compiled.actions(_stages_one_after_another(search.best, search.job)))


def _stages_one_after_another(rows: list[list[int]], job: Job) -> list[list[int]]:
    """The same order, but where a rank runs some W it is the highest stage's whose I is done, so that this one's
    gradients are all there as early as can be, and are summed over data ranks beside what is left.

        W3 W0 W3 W0   ->   W3 W3 W0 W0          both reduced after the last one  ->  3's behind the second one

    Left as it is where stages' W take different times.
    """
    microbatches, kind = job.num_microbatches, job.num_stages * job.num_microbatches
    for rank, row in enumerate(rows):
        stages = [stage for stage, home in enumerate(job.stage_ranks) if home == rank]
        if len({job.times[2][stage] for stage in stages}) > 1:
            continue
        waiting: list[tuple[int, int, int]] = []
        for place, code in enumerate(row):
            if code >= 2 * kind:
                row[place] = heappop(waiting)[2]
            elif code >= kind:
                stage, microbatch = divmod(code - kind, microbatches)
                heappush(waiting, (-stage, microbatch, code + kind))
    return rows


def _waves(
    shape: Schedule, num_waves: int, costs: CostModel, budget: float
) -> Iterator[tuple[list[list[int]], FillPolicy]]:
    """The paper's order, then those of `hanayo` for P M_a, or less, or for what more the budget allows."""
    orders = []
    if shape.num_microbatches <= shape.num_ranks:
        paper = paper_order(shape.name, shape.num_ranks, num_waves, shape.num_microbatches)
        halves = ([replace(one, kind=Kind.F if one.kind is Kind.F else Kind.I) for one in row] for row in paper.actions)
        orders.append(Evaluator(shape, costs).rows(halves))
        yield orders[0], FillPolicy()
    for room in dict.fromkeys((min(budget, shape.num_ranks), budget)):
        for order in wave_orders(shape, num_waves, costs, room):
            orders.append(order)
            yield order, FillPolicy()
    rank = 4 * num_waves
    for patience, weights_first in product((0.0, 0.5, 1.0), (False, True)):
        for reach, order in product((2 * rank, rank, rank // 2, inf), orders[:2]):
            yield order, FillPolicy(reach, patience, weights_first)


def _patterns(job: Job, effort: int) -> Iterator[tuple[list[list[int]], FillPolicy]]:
    """The patterns that do best in a job with fewer micro-batches, the best first."""
    trial = replace(job, num_microbatches=min(job.num_microbatches, 2 * job.num_ranks))
    stages_per_rank = job.stage_ranks.count(0)
    manners = (FillPolicy(reach=2 * stages_per_rank), FillPolicy(weights_first=True))
    count = max(effort // 2, min(4 * effort, 120 * trial.num_actions)) // trial.num_actions
    tries = islice(product(_drawn(job), (False, True), manners), count)
    played = []
    for pattern, weights, manner in tries:
        plan = trial.rows(pattern.keys(trial.num_microbatches, weights))
        played.append((ListScheduler(trial, plan, manner).play(), pattern, weights, manner))
    for _, pattern, weights, manner in nsmallest(8, played, key=itemgetter(0)):
        yield job.rows(pattern.keys(job.num_microbatches, weights)), manner


def _drawn(job: Job) -> list[Pattern]:
    """Patterns: first those without idle cells that use the room there is, no less and little more."""
    random = Random(0)
    drawn = (Pattern(job.stage_ranks, _pauses(random, job.stage_ranks.count(0))) for _ in range(1000))
    patterns = list({one.cells: one for one in drawn}.values())
    return sorted(patterns, key=lambda one: (one.period, abs(one.peak - job.capacity), one.latency))


def _pauses(random: Random, stages_per_rank: int) -> Pauses:
    down, up, back_down, back_up = (random.choice((0, 0, 0, 0, 1, 1, 2, 3)) for _ in range(4))
    turn = random.choice((0, 0, 0, 1, 2, 3, stages_per_rank))
    weights = random.choice((0, 0, 0, 1, 2, stages_per_rank))
    return Pauses(down, up, back_down, back_up, turn, weights, period=random.choice((0, 0, 0, 1, 2)))
