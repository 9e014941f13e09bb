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

ListScheduler: simulates the ranks forward in time along a plan, and fills their idle time with ready work.

A plan gives the order in which each rank should run its forwards and input gradients. If a rank followed it strictly,
it would idle while it waits for a message or for activation memory. In such a gap it runs another ready action:

    plan     F0 F1 F2 | I0 F3 I1 F4 ...        next is I0, which arrives in 0.7
    gap      a forward from further along the plan (within `reach`), or a weight gradient, if it fits (`tolerance`)

So a rank keeps close to the plan, which leaves time for messages, and idles only where nothing can run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import inf
from random import Random

from lightning_hanayo.schedule.search.activation_budget import Budget
from lightning_hanayo.schedule.search.evaluator import ActionTimes, CodeRows, Evaluator, SchedulingProblem


@dataclass(frozen=True, slots=True)
class FillPolicy:
    """How a rank fills a gap in its plan."""

    reach: float = 0.0
    """how many positions ahead in the plan a forward or input gradient may be taken from"""
    tolerance: float = 0.0
    """the part of the action's time that must fit the gap: 0, any may start; 1, only those that end in it"""
    weights_first: bool = False
    """whether a weight gradient is tried before actions that are ahead in the plan"""


_Hop = tuple[int, float]
"""the distance between the codes of two actions, and the time of the message between them"""


class ListScheduler:
    """One run of the ranks along `plan`: for each rank the codes of its F and I, and maybe W, in the planned order."""

    def __init__(self, problem: SchedulingProblem, plan: CodeRows, policy: FillPolicy) -> None:
        self._plan, self._policy = plan, policy
        self._num_actions, self._splits = problem.num_actions, problem.split
        self._microbatches, self._stages = problem.num_microbatches, problem.num_stages
        self._kind = self._stages * self._microbatches  # codes of one kind: F below it, I below twice, W above
        # by node, which is code // micro-batches
        self._rank_of, self._takes = problem.stage_ranks * 3, [time for times in problem.times for time in times]
        self._sources, self._targets = self._hops(problem)
        self._forwards_left = 0
        if problem.forwards_first:  # all inputs of the last stage's backwards arrive with its last forward
            self._forwards_left = self._microbatches
            self._targets[self._stages - 1] = self._sources[2 * self._stages - 1] = None
        self._ends = [-1.0] * (3 * self._kind)
        self._positions = [0] * (3 * self._kind)
        for row in plan:
            for position, code in enumerate(row):
                self._positions[code] = position
        self._weights_are_planned = sum(map(len, plan)) > 2 * self._kind
        self._tick = 1e-9 * sum(map(sum, problem.times))
        self._reach = policy.reach
        ranks = range(problem.num_ranks)
        self._next, self._free = [0 for _ in ranks], [0.0 for _ in ranks]
        self._ready: list[list[int]] = [[] for _ in ranks]
        self._weights: list[list[tuple[int, int]]] = [[] for _ in ranks]
        stages = map(problem.stage_ranks.count, ranks)
        self._budgets = [Budget(problem.capacity, held, problem.num_microbatches) for held in stages]
        self._events: list[tuple[float, int]] = []
        self.rows: list[list[int]] = [[] for _ in ranks]
        """the codes in the order in which each rank ran them"""

    def _hops(self, problem: SchedulingProblem) -> tuple[list[_Hop | None], list[_Hop | None]]:
        """By node: the F or I from which its input comes, and the one to which its output goes.

        0F -> 1F -> 2F -> 2I -> 1I -> 0I
        """
        sources: list[_Hop | None] = [None] * (3 * self._stages)
        targets = list(sources)
        way = [*range(self._stages), *range(2 * self._stages - 1, self._stages - 1, -1)]
        hops = [*problem.hops, 0.0, *problem.hops[::-1]]
        for one, other, hop in zip(way, way[1:], hops, strict=False):
            distance = (other - one) * self._microbatches
            targets[one], sources[other] = (distance, hop), (-distance, hop)
        return sources, targets

    def run(self, limit: float = inf) -> float:
        """Run all actions once; returns the makespan. This always ends: the oldest micro-batch can always go on.

        Infinity if it is more than `limit`: the run ends as soon as a rank has idled for too long to keep to that.
        """
        events, free, ends, positions = self._events, self._free, self._ends, self._positions
        microbatches, takes, rank_of, targets = self._microbatches, self._takes, self._rank_of, self._targets
        slack = [limit] * len(free)  # how long each rank may still idle
        for node in range(self._num_actions // microbatches):
            slack[rank_of[node]] -= microbatches * takes[node]
        events.append((0.0, 0))
        now = 0.0
        while events or self._lift_reach(now):
            now = events[0][0] + self._tick  # what differs by rounding alone happens at once
            awake = set()
            while events and events[0][0] <= now:  # an input has arrived (its action's code), or a rank is free
                event = heappop(events)[1]
                if event < 0:
                    rank = -1 - event
                else:
                    rank = rank_of[event // microbatches]
                    heappush(self._ready[rank], positions[event])
                if free[rank] <= now:
                    awake.add(rank)
            for rank in sorted(awake):
                code = self._choose(rank, now)
                if code is None:
                    continue
                start = max(now - self._tick, free[rank])
                slack[rank] -= start - free[rank]
                if slack[rank] < 0:
                    return inf
                node = code // microbatches
                ends[code] = free[rank] = end = start + takes[node]
                self.rows[rank].append(code)
                heappush(events, (end, -1 - rank))
                target = targets[node]
                if target is not None:
                    heappush(events, (end + target[1], code + target[0]))
                self._account(rank, code)
        return max(free)

    def _lift_reach(self, now: float) -> bool:
        """If actions are left but every rank waits for memory or for an action beyond `reach`: remove that limit."""
        if sum(map(len, self.rows)) == self._num_actions:
            return False
        assert self._reach < inf
        self._reach = inf
        self._events += [(now, -1 - rank) for rank in range(len(self.rows))]
        return True

    def _choose(self, rank: int, now: float) -> int | None:
        row, position = self._plan[rank], self._next[rank]
        while position < len(row) and self._ends[row[position]] >= 0:
            position += 1
        self._next[rank] = position
        gap = inf
        if position < len(row):
            code, ready = row[position], self._ready[rank]
            if code >= 2 * self._kind:
                if 0 <= self._ends[code - self._kind] <= now:  # its I has ended
                    return heappop(self._weights[rank])[1]
            elif not ready or ready[0] != position:
                gap = (
                    self._arrival(code) - now + 2 * self._tick
                )  # `now` is a tick late, and an action that fits exactly fits
            elif code >= self._kind or self._budgets[rank].allows(code % self._microbatches):
                return row[heappop(ready)]
        longest = gap / self._policy.tolerance if self._policy.tolerance else inf
        if self._policy.weights_first:
            weight = self._weight(rank, longest)
            return self._ahead(rank, position, longest) if weight is None else weight
        ahead = self._ahead(rank, position, longest)
        return self._weight(rank, longest) if ahead is None else ahead

    def _arrival(self, code: int) -> float:
        """When the input of `code` (an F or I) will have arrived; infinity if that isn't known yet."""
        source = self._sources[code // self._microbatches]
        end = -1.0 if source is None else self._ends[code + source[0]]
        return inf if source is None or end < 0 else end + source[1]

    def _ahead(self, rank: int, position: int, longest: float) -> int | None:
        """The first forward or input gradient that is ready further along the plan."""
        ready, row, skipped = self._ready[rank], self._plan[rank], []
        found = None
        while found is None and ready and ready[0] <= position + self._reach:
            at = heappop(ready)
            code = row[at]
            fits = self._takes[code // self._microbatches] <= longest
            if fits and (code >= self._kind or self._budgets[rank].allows(code % self._microbatches)):
                found = code
            else:
                skipped.append(at)
        for at in skipped:
            heappush(ready, at)
        return found

    def _weight(self, rank: int, longest: float) -> int | None:
        """The next weight gradient, in the planned order or else in the order of the input gradients."""
        waiting = self._weights[rank]
        if waiting and self._takes[waiting[0][1] // self._microbatches] <= longest:
            return heappop(waiting)[1]
        return None

    def _account(self, rank: int, code: int) -> None:
        """Note the effect of an action on its rank: on memory, on weight gradients, and on the first stage's input."""
        kind, microbatch = code // self._kind, code % self._microbatches
        if kind == 0:
            self._budgets[rank].take(microbatch)
            if code == microbatch and microbatch + 1 < self._microbatches:
                heappush(self._ready[rank], self._positions[code + 1])
            if self._forwards_left and code >= self._kind - self._microbatches:
                self._forwards_left -= 1
                if not self._forwards_left:
                    backwards = range(2 * self._kind - self._microbatches, 2 * self._kind)
                    self._events.extend((self._ends[code], backward) for backward in backwards)
                    heapify(self._events)
        elif kind == 1 and self._splits:
            weight = code + self._kind
            heappush(self._weights[rank], (self._positions[weight if self._weights_are_planned else code], weight))
        else:
            self._budgets[rank].free(microbatch)


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
