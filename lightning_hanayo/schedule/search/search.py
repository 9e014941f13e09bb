"""Search: tries plans and small changes to them, and keeps the best order found, within a limited effort.

plans ---> ListScheduler ---> order ---> makespan, and by how much a second step ends later ---> best so far
                           ^                                                                   |
                           +------------- some actions a little earlier or later -------------+

Pattern: when one micro-batch runs each action, so that others can follow every period without a collision.

A rank's time is divided into cells of one length, the time of one stage's F, I or W. 3V cells (V stages per rank) make
a period, in which each micro-batch takes one cell for each of its actions on the rank:

    P = 2, W = 1      cell     0  1  2  3  4  5 | 6  7  8  9 10
    no pauses         rank 0   F0       F3 I3 W3 |    I0 W0             6 cells later, micro-batch 1 does the same
                      rank 1      F1 F2       I2 | I1       W2 W1       in the cells that are still free

Pauses leave time for messages, and cost memory: a micro-batch holds its activations for longer, so more of them are
under way at once. The steady state of the whole schedule is one such pattern, so its memory is known in advance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from random import Random

from lightning_hanayo.schedule.search.evaluator import ActionTimes, CodeRows, Evaluator
from lightning_hanayo.schedule.search.list_scheduler import FillPolicy, ListScheduler
from lightning_hanayo.schedule.search.problem import SchedulingProblem

EFFORT = 600_000
"""how many actions a search may run in total; the first order is always run to its end, however large"""
MAX_RUNS = 1000
"""how many orders a search runs at most: enough for a small table, where `EFFORT` would allow many more"""

_ROUNDING = 1e-8
"""more than what `_rounded` changes, relatively"""

Score = tuple[float, float]
"""of an order, the lower the better: the times of one step and of each following one, or the other way round"""


class Search:
    """The best order found so far, and the effort that is left to find a better one.

    `steady`: compare orders by the time that each of many steps adds if they follow each other without a barrier, and
    then by the time of one step alone; else the other way round.
    """

    def __init__(self, problem: SchedulingProblem, evaluator: Evaluator, *, steady: bool = False) -> None:
        self.problem, self.evaluator, self.steady = problem, evaluator, steady
        self.best: list[list[int]] = []
        self.score: Score = (inf, inf)
        self._bounds = self._score(*map(_rounded, lower_bounds(problem)))
        self._enough = self._bounds[0]
        if all(len(set(times)) == 1 for times in problem.times) and problem.capacity >= problem.num_stages:
            self._enough += sum(problem.hops)  # the closed form: other orders are hardly ever faster
        self.effort = EFFORT
        self.actions_left = min(self.effort, MAX_RUNS * problem.num_actions)  # how many more actions may be run
        if steady:
            self.actions_left //= 4  # the builder's own plans are hardly ever improved

    def can_improve(self, until: float = 0) -> bool:
        """Whether a better order is possible, and more than `until` actions of the effort are left to look for it."""
        return not self.best or (self.actions_left > until and self.score > self._bounds)

    def try_plans(self, plans: Iterator[tuple[list[list[int]], FillPolicy]], until: float = 0) -> None:
        """Run plan after plan, while more than `until` actions of the effort are left."""
        while self.can_improve(until) and (one := next(plans, None)) is not None:
            self.run(*one)

    def try_order(self, rows: list[list[int]]) -> None:
        """Keep an order that another builder made, unchanged, if it fits the capacity and is the best so far."""
        kind = self.problem.num_actions // 3
        held = (accumulate((code < kind) - (code >= 2 * kind) for code in row) for row in rows)
        if max(map(max, held)) <= self.problem.capacity:
            self._keep(rows, self.evaluator.makespan(rows))

    def _score(self, makespan: float, following: float) -> Score:
        return (following, makespan) if self.steady else (makespan, following)

    def _keep(self, rows: list[list[int]], makespan: float) -> Score:
        """Score an order; it becomes the best if it is better than that."""
        makespan = _rounded(makespan)
        if not self.steady and (makespan > self.score[0] or (makespan == self.score[0] and self.actions_left <= 0)):
            return makespan, inf
        following = inf
        if self.steady or self.actions_left > 0:  # each rank begins a second step as soon as its own first one is done
            first = self._times(rows)
            following = _rounded(self._times(rows, first.last).makespan - first.makespan)
        score = self._score(makespan, following)
        if score < self.score:
            self.best, self.score = rows, score
        if self.score[0] <= self._enough:  # there is little left to gain
            self.actions_left = min(self.actions_left, self.effort // 8, MAX_RUNS // 25 * self.problem.num_actions)
        return score

    def _times(self, rows: list[list[int]], begin: list[float] | None = None) -> ActionTimes:
        times = self.evaluator.run(rows, begin)
        assert times is not None, "an order that a scheduler ran can't deadlock"
        return times

    def run(self, plan: CodeRows, policy: FillPolicy, wanted: float = 0.0) -> tuple[Score, list[list[int]]]:
        """Run one plan. Returns the order and its score, and keeps it if it is the best so far.

        Where one step counts, a run that gets longer than the best one and than `wanted` is given up: its score is
        infinite.
        """
        scheduler = ListScheduler(self.problem, plan, policy)
        makespan = scheduler.run(inf if self.steady else max(self.score[0], wanted) * (1 + _ROUNDING))
        runs = 3 if self.steady else 1  # the time of a following step takes two more runs
        self.actions_left -= self.problem.num_actions * runs
        return self._keep(scheduler.rows, makespan), scheduler.rows

    def improve(self) -> None:
        """Change the best order a little and run it again, while effort is left; keep orders that are no worse."""
        if not self.can_improve() or self.score[0] <= self._enough:
            return
        random = Random(0)
        policies = [FillPolicy(*one) for one in ((), (1,), (2, 0.5, True), (4,), (2, 0.5))]
        rows, time = self.best, self.score[0]
        keys = self._starts(rows)
        while self.can_improve():
            changed = _changed(keys, self.problem, random)
            (found, _), found_rows = self.run(self.problem.rows(changed), random.choice(policies), time)
            if found <= time * (1 + 1e-9):
                rows, time = found_rows, found
                keys = self._starts(rows)

    def _starts(self, rows: list[list[int]]) -> list[float]:
        """When each F and I starts, by code."""
        starts = [0.0] * self.problem.num_actions
        for row, row_starts in zip(rows, self._times(rows).starts, strict=True):
            for code, start in zip(row, row_starts, strict=True):
                starts[code] = start
        return starts[: len(starts) // 3 * 2]


def lower_bounds(problem: SchedulingProblem) -> tuple[float, float]:
    """The least time of one step (a rank's work and the actions before it), and of each following one (its work)."""
    lead = bound = 0.0
    work = [0.0] * problem.num_ranks
    for stage, rank in enumerate(problem.stage_ranks):
        work[rank] += problem.num_microbatches * sum(times[stage] for times in problem.times)
    forward, backward, _ = problem.times
    for stage in range(problem.num_ranks):
        rank = problem.stage_ranks[stage]
        wait = 0.0  # between its last forward and its first backward
        if problem.forwards_first:
            last = problem.num_stages - 1 - problem.stage_ranks[::-1].index(rank)
            wait = sum(forward[last + 1 :]) + sum(backward[last + 1 :]) + 2 * sum(problem.hops[last:])
        bound = max(bound, lead + work[rank] + wait)
        lead += problem.times[0][stage] + (problem.hops[stage] if stage < len(problem.hops) else 0.0)
    return bound, max(work)


def _rounded(time: float) -> float:
    """Rounded, so that sums in another order compare equal."""
    return float(f"{time:.9g}")


def _changed(keys: list[float], problem: SchedulingProblem, random: Random) -> list[float]:
    """Move some related actions a little: of one stage, of one leg (P stages in a row) or of one micro-batch."""
    keys = list(keys)
    num_ranks, num_stages, num_microbatches = problem.num_ranks, problem.num_stages, problem.num_microbatches
    cell = sum(map(sum, problem.times)) / (3 * num_stages)
    for _ in range(random.choice((1, 1, 2, 3))):
        shift = random.choice((-1, 1)) * random.choice((0.5, 1, 1.5, 2, 3, 4, 6, 8, 12)) * cell
        kind, stage = random.randrange(2), random.randrange(num_stages)
        first = random.randrange(num_microbatches)
        some = range(first, min(num_microbatches, first + 1 + int(random.expovariate(0.3))))
        leg = stage - stage % num_ranks
        one_stage, one_leg, all_stages = range(stage, stage + 1), range(leg, leg + num_ranks), range(num_stages)
        only = range(first, first + 1)
        stages, microbatches = random.choice(
            ((one_stage, only), (one_stage, some), (all_stages, only), (one_leg, some), (all_stages, some))
        )
        for one in stages:
            for microbatch in microbatches:
                keys[(kind * num_stages + one) * num_microbatches + microbatch] += shift
    return keys


@dataclass(frozen=True, slots=True)
class Pauses:
    """Cells left free: after messages down (to the next rank) and up, in the forward and in the backward; between
    forward and backward; before the weight gradients; and the cells of a period beyond 3V.
    """

    down: int = 0
    up: int = 0
    back_down: int = 0
    back_up: int = 0
    turn: int = 0
    weights: int = 0
    period: int = 0


class Pattern:
    """One micro-batch's cells: at each stage the first free one that keeps to `pauses`."""

    def __init__(self, stage_ranks: Sequence[int], pauses: Pauses) -> None:
        stages = range(len(stage_ranks))
        self._stage_ranks = stage_ranks
        self.period = 3 * stage_ranks.count(0) + pauses.period
        used = [[False] * self.period for _ in range(max(stage_ranks) + 1)]

        def place(stage: int, cell: int) -> int:
            row = used[stage_ranks[stage]]
            while row[cell % self.period]:
                cell += 1
            row[cell % self.period] = True
            return cell

        def walk(order: Sequence[int], cell: int, down: int, up: int) -> dict[int, int]:
            cells: dict[int, int] = {}
            for stage in order:
                here = stage_ranks[stage]
                before = stage_ranks[next(reversed(cells))] if cells else here
                cell = cells[stage] = place(stage, cell + (down if here > before else up if here < before else 0))
                cell += 1
            return cells

        forward = walk(stages, 0, pauses.down, pauses.up)
        turned = forward[stages[-1]] + 1 + pauses.turn
        backward = walk(stages[::-1], turned, pauses.back_down, pauses.back_up)
        weights = {stage: place(stage, backward[stage] + 1 + pauses.weights) for stage in stages[::-1]}
        self.forward, self.backward, self.weights = (
            [cells[stage] for stage in stages] for cells in (forward, backward, weights)
        )

    @property
    def cells(self) -> tuple[tuple[int, ...], ...]:
        """The cells of all F, all I and all W, and the period. Two patterns with the same cells are the same."""
        return tuple(map(tuple, (self.forward, self.backward, self.weights, [self.period])))

    @property
    def latency(self) -> int:
        """Cells from a micro-batch's first forward to its last input gradient."""
        return max(self.backward) + 1

    @property
    def peak(self) -> int:
        """The most activations on any rank in the steady state, counted in stages."""
        held = [[0] * self.period for _ in range(max(self._stage_ranks) + 1)]
        for rank, begin, end in zip(self._stage_ranks, self.forward, self.weights, strict=True):
            whole, rest = divmod(end + 1 - begin, self.period)
            for cell in range(self.period):
                held[rank][cell] += whole + ((cell - begin) % self.period < rest)
        return max(map(max, held))

    def keys(self, num_microbatches: int, weights: bool) -> list[float]:
        """By code: the cell of each F and I, and of each W if `weights`."""
        cells_of_kinds = [self.forward, self.backward, self.weights][: 3 if weights else 2]
        starts = [microbatch * self.period for microbatch in range(num_microbatches)]
        return [float(cell + start) for cells in cells_of_kinds for cell in cells for start in starts]
