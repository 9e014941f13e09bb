"""hanayo: wave schedules with whole backwards (SC'23, doi 10.1145/3581784.3607073), extended to any B.

B = P is the paper's order, action for action. Its 4W legs are numbered forward 0..2W-1, backward 2W..4W-1; even legs
run down the ranks, odd ones up:

    P = 4, W = 1     rank 1   F0 F1 F2 F0 F3 F1 B0 F2 B1 F3 B2 B0 B3 B1 B2 B3
                     leg      0  0  0  1  0  1  2  1  2  1  2  3  2  3  3  3

The order for other B is our own extension. Micro-batches form groups of P. An action's key is its start time in the
paper's order, plus the time that a rank works for the groups before its own. A list scheduler runs actions in the order
of their keys, within the activation budget:

    group 0   v v v         key = start in the paper's order + group * P (T_F + T_B)
    group 1         v v v

So the end of one group overlaps with the begin of the next. At T_C = 0 the makespan is
B (T_F + T_B) + (P-1) max(T_F, T_B)/W for every multiple of P: the idle time is that of the paper's single group.

hanayo-zb: wave schedules with the backward split, optimized for any W, B, costs and activation budget.

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
from itertools import accumulate, islice, product
from math import inf
from operator import itemgetter
from random import Random

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.builders.v_schedules import v_half, v_min, zbv
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule
from lightning_hanayo.schedule.search.evaluator import Evaluator, SchedulingProblem
from lightning_hanayo.schedule.search.search import FillPolicy, ListScheduler, Pattern, Pauses, Search
from lightning_hanayo.schedule.simulate import simulate
from lightning_hanayo.schedule.table import Action, Kind, zigzag

CLOSE = 1.005
"""an order at most this factor slower than one that idles no longer than the paper's single group ends the search"""


@register_schedule("hanayo", depth="waves")
def hanayo(request: Request) -> Schedule:
    """The paper's order at B = P, else the best of a few candidates; always within the budget (default P)."""
    budget = budget_of(request)
    costs = request.costs or CostModel()
    paper = paper_order(request.name, request.num_ranks, request.num_waves, request.num_microbatches)
    timeline = simulate(paper, costs)
    fits = max(timeline.peak_activations) <= budget + 1e-9
    if fits and request.num_microbatches == request.num_ranks:
        return paper
    evaluator = Evaluator(paper, costs)
    best, makespan = (evaluator.encode(paper.actions), timeline.makespan) if fits else ([], inf)
    group = simulate(paper_order("group", request.num_ranks, request.num_waves, request.num_ranks), costs)
    enough = CLOSE * (group.makespan - max(group.busy) + max(timeline.busy))
    budgets = dict.fromkeys((min(budget, request.num_ranks), budget))  # more than P only if P isn't enough
    for candidate in (found for limit in budgets for found in wave_orders(paper, request.num_waves, costs, limit)):
        rows = evaluator.fused(candidate)
        time = evaluator.makespan(rows)
        if time < makespan * (1 - 1e-9):
            best, makespan = rows, time
        if makespan <= enough:
            break
    return replace(paper, actions=evaluator.decode(best))


def budget_of(request: Request) -> float:
    """The activation budget of a wave schedule.

    Raises `HanayoError` if it is too small for one micro-batch, or `num_stages_per_rank` isn't 2W.
    """
    request.stages_per_rank(2 * request.num_waves)
    budget = request.num_ranks if request.activation_budget is None else request.activation_budget
    if not budget >= 1:
        unit = "in M_a: one micro-batch's activations on a rank, which it holds before its first backward"
        raise HanayoError(f"schedule {request.name!r}: activation_budget={budget:g}, expected at least 1 ({unit})")
    return budget


def wave_orders(shape: Schedule, num_waves: int, costs: CostModel, budget: float) -> Iterator[list[list[int]]]:
    """Candidate orders of forwards and whole backwards, as codes of F and I, to be simulated under `costs`.

    Orders made for even stages and free messages are often the best under the real costs too: a list scheduler that
    sees uneven arrivals runs whatever is ready, and so leaves the regular order.
    """
    num_ranks, num_microbatches = shape.num_ranks, shape.num_microbatches
    even = evened(costs, num_ranks)
    groups = groupings(num_microbatches, num_ranks)
    tries = [(even, sizes, True) for sizes in groups] + [(even, groups[0], False)]
    tries += [(costs, groups[0], True)] if costs != even else []
    for assumed, sizes, forwards_first in tries:
        problem = SchedulingProblem.of(shape, assumed, budget, split=False)
        keys = _keys(num_ranks, num_waves, assumed, sizes)
        split = len(keys) // 2
        later = 1 + max(keys)
        first, second = (0.0, later) if forwards_first else (later, 0.0)
        plan = problem.rows([key + first for key in keys[:split]] + [key + second for key in keys[split:]])
        scheduler = ListScheduler(problem, plan, FillPolicy(reach=inf))
        scheduler.run()
        yield scheduler.rows


def evened(costs: CostModel, num_ranks: int) -> CostModel:
    """The same total work, divided evenly among the stages, and free messages."""
    parts = (costs.forward, costs.backward_input, costs.backward_weight)
    forward, backward_input, backward_weight = (
        sum(part) / num_ranks if isinstance(part, tuple) else part for part in parts
    )
    return CostModel(forward, backward_input, backward_weight, per_action=costs.per_action)


def groupings(num_microbatches: int, num_ranks: int) -> list[tuple[int, ...]]:
    """Ways to cut B into groups of at most P: the last one smaller, the first one smaller, all even, groups of one."""
    full, rest = divmod(num_microbatches, num_ranks)
    small = (rest,) if rest else ()
    count = full + len(small)
    even = tuple(num_microbatches // count + (group < num_microbatches % count) for group in range(count))
    cuts = [(num_ranks,) * full + small, small + (num_ranks,) * full, even, (1,) * num_microbatches]
    return list(dict.fromkeys(cuts))


def _keys(num_ranks: int, num_waves: int, costs: CostModel, sizes: tuple[int, ...]) -> list[float]:
    """By code: the start in the paper's order of the action's group, plus a rank's work for the groups before."""
    orders = {size: paper_order("group", num_ranks, num_waves, size) for size in {*sizes, num_ranks}}
    timelines = {size: simulate(order, costs) for size, order in orders.items()}
    work = max(timelines[num_ranks].busy) / num_ranks
    tick = 1e-6 * work or 1.0
    starts = {
        size: {(span.action.stage, span.action.kind, span.action.microbatch): span.start for span in timeline.spans}
        for size, timeline in timelines.items()
    }
    begins = accumulate(sizes, initial=0)
    positions = [
        (begin, starts[size], item) for size, begin in zip(sizes, begins, strict=False) for item in range(size)
    ]
    return [
        float(round((start[stage, kind, item] + begin * work) / tick))
        for kind in (Kind.F, Kind.B)
        for stage in range(2 * num_waves * num_ranks)
        for begin, start, item in positions
    ]


def paper_order(name: str, num_ranks: int, num_waves: int, num_microbatches: int) -> Schedule:
    """The paper's order for groups of P one after another, without the micro-batches beyond the last one."""
    rows = []
    for rank in range(num_ranks):
        legs = [_leg(leg, rank, num_ranks, num_waves) for leg in range(4 * num_waves)]
        order, starts = _order(rank, num_ranks, len(legs)), range(0, num_microbatches, num_ranks)
        items = ((legs[leg], start + item) for start in starts for leg, item in order)
        rows.append(tuple(Action(*leg, item) for leg, item in items if item < num_microbatches))
    return Schedule(name, zigzag(num_ranks, num_waves), tuple(rows), num_microbatches)


def _leg(leg: int, rank: int, num_ranks: int, num_waves: int) -> tuple[int, Kind]:
    """The stage and kind of a leg on a rank."""
    position = rank if leg % 2 == 0 else num_ranks - 1 - rank
    if leg < 2 * num_waves:
        return leg * num_ranks + position, Kind.F
    return 4 * num_waves * num_ranks - 1 - (leg * num_ranks + position), Kind.B


def _order(rank: int, num_ranks: int, num_legs: int) -> list[tuple[int, int]]:
    """(leg, micro-batch) for one group of P: `lead` micro-batches of a leg, then it takes turns with the next leg."""
    order: list[tuple[int, int]] = []
    begun = 0
    for leg in range(num_legs):
        lead = num_ranks - rank if leg % 2 == 0 else rank + 1
        order += [(leg, item) for item in range(begun, lead)]
        begun = 0
        for item in range(lead, num_ranks):
            if leg + 1 < num_legs:
                order.append((leg + 1, begun))
                begun += 1
            order.append((leg, item))
    return order


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
