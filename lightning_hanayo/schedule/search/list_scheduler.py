"""ListScheduler: simulates the ranks forward in time along a plan, and fills their idle time with ready work.

A plan gives the order in which each rank should run its forwards and input gradients. If a rank followed it strictly,
it would idle while it waits for a message or for activation memory. In such a gap it runs another ready action:

    plan     F0 F1 F2 | I0 F3 I1 F4 ...        next is I0, which arrives in 0.7
    gap      a forward from further along the plan (within `reach`), or a weight gradient, if it fits (`tolerance`)

So a rank keeps close to the plan, which leaves time for messages, and idles only where nothing can run.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
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
