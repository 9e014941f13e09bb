"""ListScheduler: simulates the ranks forward in time along a plan, and fills their idle time with ready work.

A plan gives the order in which each rank should run its forwards and input gradients. If a rank followed it strictly,
it would idle while it waits for a message or for activation memory. In such a gap it runs another ready action:

    plan     F0 F1 F2 | I0 F3 I1 F4 ...        next is I0, which arrives in 0.7
    gap      a forward from further along the plan (within `reach`), or a weight gradient, if it fits (`tolerance`)

So a rank keeps close to the plan, which leaves time for messages, and idles only where nothing can run.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from lightning_hanayo.schedule.search.evaluator import CodeRows
from lightning_hanayo.schedule.search.problem import Budget, SchedulingProblem


@dataclass(frozen=True, slots=True)
class FillPolicy:
    """How a rank fills a gap in its plan."""

    reach: float = 0.0
    """how many positions ahead in the plan a forward or input gradient may be taken from"""
    tolerance: float = 0.0
    """the part of the action's time that must fit the gap: 0, any may start; 1, only those that end in it"""
    weights_first: bool = False
    """whether a weight gradient is tried before actions that are ahead in the plan"""


class ListScheduler:
    """One run of the ranks along `plan`: for each rank the codes of its F and I, and maybe W, in the planned order."""

    def __init__(self, problem: SchedulingProblem, plan: CodeRows, policy: FillPolicy) -> None:
        self._problem, self._plan, self._policy = problem, plan, policy
        self._microbatches, self._stages = problem.num_microbatches, problem.num_stages
        self._kind = self._stages * self._microbatches  # codes of one kind: F below it, I below twice, W above
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
        self._forwards_left = problem.num_microbatches if problem.forwards_first else 1
        """of the last stage, before its backwards are ready"""
        self.rows: list[list[int]] = [[] for _ in ranks]
        """the codes in the order in which each rank ran them"""

    def run(self) -> float:
        """Run all actions once; returns the makespan. This always ends: the oldest micro-batch can always go on."""
        events, free = self._events, self._free
        self._arrive(0)
        events.append((0.0, -1))
        now = 0.0
        while events or self._lift_reach(now):
            now = events[0][0] + self._tick
            awake = set()
            while events and events[0][0] <= now:
                event = heappop(events)[1]
                rank = -1 - event if event < 0 else self._arrive(event)
                if free[rank] <= now:
                    awake.add(rank)
            for rank in sorted(awake):
                code = self._choose(rank, now)
                if code is not None:
                    self._start(rank, code, max(now - self._tick, free[rank]))
        return max(free)

    def _lift_reach(self, now: float) -> bool:
        """If actions are left but every rank waits for memory or for an action beyond `reach`: remove that limit."""
        if sum(map(len, self.rows)) == self._problem.num_actions:
            return False
        assert self._reach < inf
        self._reach = inf
        self._events += [(now, -1 - rank) for rank in range(self._problem.num_ranks)]
        return True

    def _arrive(self, code: int) -> int:
        """Note that the input of `code` (an F or I) has arrived. Returns its rank."""
        rank = self._problem.stage_ranks[code // self._microbatches % self._stages]
        heappush(self._ready[rank], self._positions[code])
        return rank

    def _choose(self, rank: int, now: float) -> int | None:
        row, position = self._plan[rank], self._next[rank]
        while position < len(row) and self._ends[row[position]] >= 0:
            position += 1
        self._next[rank] = position
        gap = inf
        if position < len(row):
            code, ready = row[position], self._ready[rank]
            if code >= 2 * self._kind:
                if 0 <= self._ends[code - self._kind] <= now:
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
        stage = code // self._microbatches % self._stages
        if code < self._kind:
            if stage == 0:
                return inf
            end, hop = self._ends[code - self._microbatches], self._problem.hops[stage - 1]
        elif stage + 1 < self._stages:
            end, hop = self._ends[code + self._microbatches], self._problem.hops[stage]
        else:
            end, hop = self._ends[code - self._kind], 0.0
            if self._problem.forwards_first:
                end = -1.0 if self._forwards_left else max(self._ends[self._kind - self._microbatches : self._kind])
        return inf if end < 0 else end + hop

    def _ahead(self, rank: int, position: int, longest: float) -> int | None:
        """The first forward or input gradient that is ready further along the plan."""
        ready, row, skipped = self._ready[rank], self._plan[rank], []
        found = None
        while found is None and ready and ready[0] <= position + self._reach:
            at = heappop(ready)
            code = row[at]
            fits = self._takes(code) <= longest
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
        if waiting and self._takes(waiting[0][1]) <= longest:
            return heappop(waiting)[1]
        return None

    def _takes(self, code: int) -> float:
        kind, rest = divmod(code, self._kind)
        return self._problem.times[kind][rest // self._microbatches]

    def _start(self, rank: int, code: int, now: float) -> None:
        kind, rest = divmod(code, self._kind)
        stage, microbatch = divmod(rest, self._microbatches)
        end = self._ends[code] = self._free[rank] = now + self._problem.times[kind][stage]
        self.rows[rank].append(code)
        heappush(self._events, (end, -1 - rank))
        if kind == 0:
            self._budgets[rank].take(microbatch)
            if stage == 0 and microbatch + 1 < self._microbatches:
                self._arrive(code + 1)
            if stage + 1 < self._stages:
                heappush(self._events, (end + self._problem.hops[stage], code + self._microbatches))
            elif self._problem.forwards_first:
                self._forwards_left -= 1
                if not self._forwards_left:
                    first = 2 * self._kind - self._microbatches
                    for ready in range(first, 2 * self._kind):
                        heappush(self._events, (end, ready))
            else:
                heappush(self._events, (end, code + self._kind))
        elif kind == 1 and stage > 0:
            heappush(self._events, (end + self._problem.hops[stage - 1], code - self._microbatches))
        if kind == 1 and self._problem.split:
            weight = code + self._kind
            heappush(self._weights[rank], (self._positions[weight if self._weights_are_planned else code], weight))
        elif kind > 0:
            self._budgets[rank].free(microbatch)
