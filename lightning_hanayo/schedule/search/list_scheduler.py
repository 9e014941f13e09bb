"""A list scheduler: runs the pipeline forward in time, each rank along its row of a plan; ready work fills idle time.

A plan says in which order each rank would best run its forwards and input gradients. Followed to the letter it leaves
holes, where a rank waits for a message or for room; there the rank runs something else that is ready:

    plan     F0 F1 F2 | I0 F3 I1 F4 ...        next is I0, which comes in 0.7
    hole     a forward from further along the plan (within `reach`), or a weight gradient, if it fits (`patience`)

So a rank keeps the plan's beat, which leaves messages their time, and idles only where nothing at all can run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.search.budget import Budget
from lightning_hanayo.schedule.table import Schedule

Rows = Sequence[Sequence[int]]
"""Codes of actions, a row per rank. As in `Compiled`: (kind S + stage) B + micro-batch, the kinds F, I, W."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be scheduled, as numbers."""

    stage_ranks: tuple[int, ...]
    num_microbatches: int
    times: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    """of each stage's F, I and W"""
    hops: tuple[float, ...]
    """from stage s to s + 1 and back; 0 within a rank"""
    capacity: int
    """the most activations a rank may hold, counted in stages"""
    split: bool = True
    """whether a backward has two parts; else I is the whole of it, and there is no W"""

    @classmethod
    def of(cls, shape: Schedule, costs: CostModel, budget: float, split: bool = True) -> "Job":
        """The job of filling `shape`, whose own actions don't matter, within `budget` M_a."""
        ranks, stages = shape.stage_ranks, range(shape.num_stages)

        def times(kind: Kind) -> tuple[float, ...]:
            return tuple(costs.of(shape, Action(stage, kind, 0)) for stage in stages)

        hops = (0.0 if here == there else costs.hop(shape, s) for s, (here, there) in enumerate(pairwise(ranks)))
        capacity = int(min(budget, shape.num_microbatches) * len(shape.stages_of(0)) + 1e-9)
        kinds = times(Kind.F), times(Kind.I if split else Kind.B), times(Kind.W)
        return cls(ranks, shape.num_microbatches, kinds, tuple(hops), capacity, split)

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return max(self.stage_ranks) + 1

    @property
    def num_stages(self) -> int:
        """Stages."""
        return len(self.stage_ranks)

    @property
    def num_actions(self) -> int:
        """Of all ranks: what one play costs."""
        return (2 + self.split) * self.num_stages * self.num_microbatches

    def rows(self, keys: Sequence[float]) -> list[list[int]]:
        """Each rank's codes in the order of their keys; as many kinds as there are keys for."""
        rows: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for code in range(len(keys)):
            rows[self.stage_ranks[code // self.num_microbatches % self.num_stages]].append(code)
        for row in rows:
            row.sort(key=keys.__getitem__)
        return rows


@dataclass(frozen=True, slots=True)
class FillPolicy:
    """How a rank fills a hole in its plan."""

    reach: float = 0.0
    """how many places ahead in the plan a forward or input gradient may be taken from"""
    patience: float = 0.0
    """how much of a filler must fit the hole: 0, any may start; 1, only what ends before the next of the plan comes"""
    weights_first: bool = False
    """whether a weight gradient goes before what lies ahead in the plan"""


class ListScheduler:
    """One play of a job along a plan.

    Args:
        job: sizes, costs and capacity.
        plan: for each rank the codes of its F and I in the planned order; its W may stand there too.
        manner: how holes are filled.
    """

    def __init__(self, job: Job, plan: Rows, manner: FillPolicy) -> None:
        self._job, self._plan, self._manner = job, plan, manner
        self._microbatches, self._stages = job.num_microbatches, job.num_stages
        self._kind = self._stages * self._microbatches  # codes of one kind: F below it, I below twice, W above
        self._ends = [-1.0] * (3 * self._kind)
        self._places = [0] * (3 * self._kind)
        for row in plan:
            for place, code in enumerate(row):
                self._places[code] = place
        self._plans_weights = sum(map(len, plan)) > 2 * self._kind
        self._tick = 1e-9 * sum(map(sum, job.times))
        self._reach = manner.reach
        ranks = range(job.num_ranks)
        self._next = [0 for _ in ranks]
        self._free = [0.0 for _ in ranks]
        self._ready: list[list[int]] = [[] for _ in ranks]
        self._weights: list[list[tuple[int, int]]] = [[] for _ in ranks]
        self._budgets = [Budget(job.capacity, job.stage_ranks.count(r), job.num_microbatches) for r in ranks]
        self._events: list[tuple[float, int]] = []
        self.rows: list[list[int]] = [[] for _ in ranks]
        """the codes in the order in which each rank ran them"""

    def play(self) -> float:
        """The makespan. Every plan comes to its end: the oldest micro-batch can always go on, if `reach` lets it."""
        events, free = self._events, self._free
        self._arrive(0)
        events.append((0.0, -1))
        now = 0.0
        while events or self._lift_reach(now):
            now = events[0][0] + self._tick
            awake = set()
            while events and events[0][0] <= now:
                what = heappop(events)[1]
                rank = -1 - what if what < 0 else self._arrive(what)
                if free[rank] <= now:
                    awake.add(rank)
            for rank in sorted(awake):
                code = self._choose(rank, now)
                if code is not None:
                    self._start(rank, code, max(now - self._tick, free[rank]))
        return max(free)

    def _lift_reach(self, now: float) -> bool:
        """Where every rank waits, for room or for what lies beyond another's reach: lift it, and look again."""
        if sum(map(len, self.rows)) == self._job.num_actions:
            return False
        assert self._reach < inf
        self._reach = inf
        self._events += [(now, -1 - rank) for rank in range(self._job.num_ranks)]
        return True

    def _arrive(self, code: int) -> int:
        """What `code` (an F or I) waits for is there. Returns its rank."""
        rank = self._job.stage_ranks[code // self._microbatches % self._stages]
        heappush(self._ready[rank], self._places[code])
        return rank

    def _choose(self, rank: int, now: float) -> int | None:
        row, place = self._plan[rank], self._next[rank]
        while place < len(row) and self._ends[row[place]] >= 0:
            place += 1
        self._next[rank] = place
        hole = inf
        if place < len(row):
            code, ready = row[place], self._ready[rank]
            if code >= 2 * self._kind:
                if 0 <= self._ends[code - self._kind] <= now:
                    return heappop(self._weights[rank])[1]
            elif not ready or ready[0] != place:
                hole = self._arrival(code) - now + 2 * self._tick  # `now` is a tick late, and what fits exactly fits
            elif code >= self._kind or self._budgets[rank].allows(code % self._microbatches):
                return row[heappop(ready)]
        longest = hole / self._manner.patience if self._manner.patience else inf
        if self._manner.weights_first:
            weight = self._weight(rank, longest)
            return self._ahead(rank, place, longest) if weight is None else weight
        ahead = self._ahead(rank, place, longest)
        return self._weight(rank, longest) if ahead is None else ahead

    def _arrival(self, code: int) -> float:
        """When what `code` (an F or I) waits for will be there, as far as that is known."""
        stage = code // self._microbatches % self._stages
        if code < self._kind:
            if stage == 0:
                return inf
            end, hop = self._ends[code - self._microbatches], self._job.hops[stage - 1]
        elif stage + 1 < self._stages:
            end, hop = self._ends[code + self._microbatches], self._job.hops[stage]
        else:
            end, hop = self._ends[code - self._kind], 0.0
        return inf if end < 0 else end + hop

    def _ahead(self, rank: int, place: int, longest: float) -> int | None:
        """The first forward or input gradient that is ready further along the plan."""
        ready, row, refused = self._ready[rank], self._plan[rank], []
        found = None
        while found is None and ready and ready[0] <= place + self._reach:
            at = heappop(ready)
            code = row[at]
            fits = self._takes(code) <= longest
            if fits and (code >= self._kind or self._budgets[rank].allows(code % self._microbatches)):
                found = code
            else:
                refused.append(at)
        for at in refused:
            heappush(ready, at)
        return found

    def _weight(self, rank: int, longest: float) -> int | None:
        """The weight gradient whose turn it is: the planned order, else that of the input gradients."""
        waiting = self._weights[rank]
        if waiting and self._takes(waiting[0][1]) <= longest:
            return heappop(waiting)[1]
        return None

    def _takes(self, code: int) -> float:
        kind, rest = divmod(code, self._kind)
        return self._job.times[kind][rest // self._microbatches]

    def _start(self, rank: int, code: int, now: float) -> None:
        kind, rest = divmod(code, self._kind)
        stage, microbatch = divmod(rest, self._microbatches)
        end = self._ends[code] = self._free[rank] = now + self._job.times[kind][stage]
        self.rows[rank].append(code)
        heappush(self._events, (end, -1 - rank))
        if kind == 0:
            self._budgets[rank].take(microbatch)
            if stage == 0 and microbatch + 1 < self._microbatches:
                self._arrive(code + 1)
            if stage + 1 < self._stages:
                heappush(self._events, (end + self._job.hops[stage], code + self._microbatches))
            else:
                heappush(self._events, (end, code + self._kind))
        elif kind == 1 and stage > 0:
            heappush(self._events, (end + self._job.hops[stage - 1], code - self._microbatches))
        if kind == 1 and self._job.split:
            weight = code + self._kind
            heappush(self._weights[rank], (self._places[weight if self._plans_weights else code], weight))
        elif kind > 0:
            self._budgets[rank].free(microbatch)
