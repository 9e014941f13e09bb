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

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import nsmallest
from itertools import accumulate, islice, product
from math import inf
from operator import itemgetter
from random import Random

from lightning_hanayo.schedule.action import Kind
from lightning_hanayo.schedule.compiled import Compiled
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.follower import Follower, Job, Manner
from lightning_hanayo.schedule.hanayo import budget_of, paper_order, wave_orders
from lightning_hanayo.schedule.pattern import Pattern, Pauses
from lightning_hanayo.schedule.placement import zigzag
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.table import Schedule
from lightning_hanayo.schedule.v_half import v_half
from lightning_hanayo.schedule.v_min import v_min
from lightning_hanayo.schedule.zbv import zbv

EFFORT = 600_000
"""Actions played in search of a better order. The first order is always played to its end, however large."""
PLAYS = 1000
"""The most orders played: in a small table, where `EFFORT` would allow many more, that is plenty."""


@register_schedule("hanayo-zb", depth="waves")
def hanayo_zb(request: Request) -> Schedule:
    """The best order found within the budget (default P); the search ends early where the lower bound is met."""
    budget = budget_of(request)
    costs = request.costs or CostModel()
    placement = zigzag(request.num_ranks, request.num_waves)
    shape = Schedule(request.name, placement, ((),) * request.num_ranks, request.num_microbatches)
    search = Search(Job.of(shape, costs, budget), Compiled(shape, costs))
    if request.num_waves == 1:
        for peer in (zbv, v_half, v_min):
            search.take(search.compiled.rows(peer(request).actions))
    tight = budget < request.num_ranks
    search.along(_waves(shape, request.num_waves, costs, budget), until=search.left // 2 if tight else 0)
    if tight:
        search.along(_patterns(search.job), until=-inf)
    search.improve()
    return replace(shape, actions=search.compiled.actions(search.best))


class Search:
    """The best order so far, and how much may still be played for a better one."""

    def __init__(self, job: Job, compiled: Compiled) -> None:
        self.job, self.compiled = job, compiled
        self.best: list[list[int]] = []
        self.makespan = self.following = inf
        self._bounds = lower_bounds(job)
        self._enough = self._bounds[0]
        if all(len(set(times)) == 1 for times in job.times) and job.capacity >= job.num_stages:
            self._enough += sum(job.hops)  # the closed form: hardly ever is anything faster
        self.left = min(EFFORT, PLAYS * job.num_actions)  # actions that may still be played

    @property
    def goes_on(self) -> bool:
        """Whether a better order can be hoped for, and may be looked for."""
        return self._goes_on(until=0)

    def _goes_on(self, until: float) -> bool:
        return not self.best or (self.left > until and (self.makespan, self.following) > self._bounds)

    def along(self, plans: Iterator[tuple[list[list[int]], Manner]], until: float = 0) -> None:
        """Play plan after plan, as long as more than `until` of the effort is left."""
        while self._goes_on(until) and (one := next(plans, None)) is not None:
            self.play(*one)

    def take(self, rows: list[list[int]]) -> None:
        """Keep an order made elsewhere, as it is, if it fits and is the best so far."""
        kind = self.job.num_actions // 3
        for row in rows:
            held = accumulate((code < kind) - (code >= 2 * kind) for code in row)
            if max(held) > self.job.capacity:
                return
        self._keep(rows, self.compiled.makespan(rows))

    def _keep(self, rows: list[list[int]], makespan: float) -> None:
        """Better is what takes less time; among these, what takes less as one of many steps without a barrier."""
        makespan = _rounded(makespan)
        if makespan > self.makespan or (makespan == self.makespan and self.left <= 0):
            return
        following = self._following(rows) if self.left > 0 else inf
        if (makespan, following) < (self.makespan, self.following):
            self.best, self.makespan, self.following = rows, makespan, following
        if self.makespan <= self._enough:
            self.left = min(self.left, EFFORT // 8, PLAYS // 25 * self.job.num_actions)  # little is left to gain

    def _following(self, rows: list[list[int]]) -> float:
        """By how much a second step ends later, each rank beginning it as soon as its own first one is over."""
        one = self.compiled.play(rows)
        assert one is not None
        two = self.compiled.play(rows, one.last)
        assert two is not None
        return _rounded(two.makespan - one.makespan)

    def play(self, plan: Sequence[Sequence[int]], manner: Manner) -> tuple[float, list[list[int]]]:
        """One play. Its order is kept if it is the best so far."""
        follower = Follower(self.job, plan, manner)
        makespan = follower.play()
        self.left -= self.job.num_actions
        self._keep(follower.rows, makespan)
        return makespan, follower.rows

    def improve(self) -> None:
        """Change the best order a little and play it again, as long as the effort lasts; what is no worse is kept."""
        if not self.goes_on or self.makespan <= self._enough:
            return
        random = Random(0)
        manners = [Manner(), Manner(reach=1), Manner(2, 0.5, True), Manner(4), Manner(reach=2, patience=0.5)]
        rows, makespan = self.best, self.makespan
        keys = self._starts(rows)
        while self.goes_on:
            changed = _changed(keys, self.job, random)
            found, found_rows = self.play(self.job.rows(changed), random.choice(manners))
            if found <= makespan * (1 + 1e-9):
                rows, makespan = found_rows, found
                keys = self._starts(rows)

    def _starts(self, rows: list[list[int]]) -> list[float]:
        """When each F and I starts, by code."""
        played = self.compiled.play(rows)
        assert played is not None
        starts = [0.0] * self.job.num_actions
        for row, times in zip(rows, played.starts, strict=True):
            for code, start in zip(row, times, strict=True):
                starts[code] = start
        return starts[: len(starts) // 3 * 2]


def lower_bounds(job: Job) -> tuple[float, float]:
    """No step can take less, and no step that follows others: a rank's work behind what comes before it; its work."""
    lead = bound = 0.0
    work = [0.0] * job.num_ranks
    for stage, rank in enumerate(job.stage_ranks):
        work[rank] += job.num_microbatches * sum(times[stage] for times in job.times)
    for stage in range(job.num_ranks):
        bound = max(bound, lead + work[job.stage_ranks[stage]])
        lead += job.times[0][stage] + (job.hops[stage] if stage < len(job.hops) else 0.0)
    return _rounded(bound), _rounded(max(work))


def _rounded(time: float) -> float:
    """Without the noise of adding in another order."""
    return float(f"{time:.9g}")


def _waves(
    shape: Schedule, num_waves: int, costs: CostModel, budget: float
) -> Iterator[tuple[list[list[int]], Manner]]:
    """The paper's order, then those of `hanayo` for P M_a, or less, or for what more the budget allows."""
    orders = []
    if shape.num_microbatches <= shape.num_ranks:
        paper = paper_order(shape.name, shape.num_ranks, num_waves, shape.num_microbatches)
        halves = ([replace(one, kind=Kind.F if one.kind is Kind.F else Kind.I) for one in row] for row in paper.actions)
        orders.append(Compiled(shape, costs).rows(halves))
        yield orders[0], Manner()
    for room in dict.fromkeys((min(budget, shape.num_ranks), budget)):
        for order in wave_orders(shape, num_waves, costs, room):
            orders.append(order)
            yield order, Manner()
    rank = 4 * num_waves
    for patience, weights_first in product((0.0, 0.5, 1.0), (False, True)):
        for reach, order in product((2 * rank, rank, rank // 2, inf), orders[:2]):
            yield order, Manner(reach, patience, weights_first)


def _patterns(job: Job) -> Iterator[tuple[list[list[int]], Manner]]:
    """The patterns that do best in a job with fewer micro-batches, the best first."""
    trial = replace(job, num_microbatches=min(job.num_microbatches, 2 * job.num_ranks))
    stages_per_rank = job.stage_ranks.count(0)
    manners = (Manner(reach=2 * stages_per_rank), Manner(weights_first=True))
    count = max(EFFORT // 2, min(4 * EFFORT, 120 * trial.num_actions)) // trial.num_actions
    tries = islice(product(_drawn(job), (False, True), manners), count)
    played = []
    for pattern, weights, manner in tries:
        plan = trial.rows(pattern.keys(trial.num_microbatches, weights))
        played.append((Follower(trial, plan, manner).play(), pattern, weights, manner))
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


def _changed(keys: list[float], job: Job, random: Random) -> list[float]:
    """Some actions that belong together, a little earlier or later: one, a stage's or a leg's or a micro-batch's."""
    keys = list(keys)
    num_ranks, num_stages, num_microbatches = job.num_ranks, job.num_stages, job.num_microbatches
    cell = sum(map(sum, job.times)) / (3 * num_stages)
    for _ in range(random.choice((1, 1, 2, 3))):
        shift = random.choice((-1, 1)) * random.choice((0.5, 1, 1.5, 2, 3, 4, 6, 8, 12)) * cell
        kind, stage = random.randrange(2), random.randrange(num_stages)
        first = random.randrange(num_microbatches)
        some = range(first, min(num_microbatches, first + 1 + int(random.expovariate(0.3))))
        leg = stage - stage % num_ranks
        stages, microbatches = random.choice(
            (
                ([stage], range(first, first + 1)),
                ([stage], some),
                (range(num_stages), range(first, first + 1)),
                (range(leg, leg + num_ranks), some),
                (range(num_stages), some),
            )
        )
        for one in stages:
            for microbatch in microbatches:
                keys[(kind * num_stages + one) * num_microbatches + microbatch] += shift
    return keys
