"""List scheduler: plays the pipeline forward in time and lets each free rank start the best action it may start."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.budget import Budget
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.dependency import waits_for
from lightning_hanayo.schedule.table import Schedule

Key = Callable[[int, Kind, int], float]
"""(stage, kind, micro-batch) -> how soon it should run; the smallest goes first."""

Node = tuple[int, Kind]
"""An action without its micro-batch: who waits for whom is the same for all of them."""


def list_schedule(
    table: Schedule,
    costs: CostModel,
    activation_budget: float,
    kinds: Sequence[Kind],
    key: Key,
) -> Schedule:
    """`table` with its ranks' lists filled.

    Whenever a rank is free it starts an action that is ready and fits the budget: of the first of `kinds` that has one,
    the one with the smallest `key`. A rank never idles on purpose. Micro-batches enter in order.

    Args:
        table: placement and number of micro-batches; its actions are ignored.
        costs: times of the actions and messages.
        activation_budget: in M_a; at least 1, else no micro-batch could ever end.
        kinds: what to run, the preferred first: `(F, B)` or `(B, F)`, or with the backward split.
        key: the priority within a kind.
    """
    return _Run(table, costs, activation_budget, kinds, key).play()


class _Run:
    """One run of the list scheduler: the clock, what is ready on each rank and what each rank holds."""

    def __init__(
        self, table: Schedule, costs: CostModel, activation_budget: float, kinds: Sequence[Kind], key: Key
    ) -> None:
        self._table, self._kinds, self._key = table, kinds, key
        stages = range(table.num_stages)
        self._takes = {(s, kind): costs.of(table, Action(s, kind, 0)) for s in stages for kind in kinds}
        self._wakes, self._missing = _who_wakes_whom(table, costs, kinds)
        self._tick = 1e-9 * sum(self._takes.values())
        self._budgets = [
            Budget(int(activation_budget * count + 1e-9), count, table.num_microbatches)
            for count in (len(table.stages_of(rank)) for rank in range(table.num_ranks))
        ]
        self._ready: list[dict[Kind, list[tuple[float, int, int]]]] = [
            {kind: [] for kind in kinds} for _ in range(table.num_ranks)
        ]
        self._rows: list[list[Action]] = [[] for _ in range(table.num_ranks)]
        self._free = [0.0] * table.num_ranks
        self._arrivals: list[tuple[float, int, Node | None, int]] = []
        self._posted = 0
        self._waiting: dict[tuple[Node, int], int] = {}

    def play(self) -> Schedule:
        self._post(0.0, (0, Kind.F), 0)
        while self._arrivals:
            now = self._arrivals[0][0]
            while self._arrivals and self._arrivals[0][0] <= now + self._tick:
                _, _, node, microbatch = heapq.heappop(self._arrivals)
                if node is not None:
                    self._arrive(node, microbatch)
            for rank, free in enumerate(self._free):
                if free <= now + self._tick and (chosen := self._choose(rank)) is not None:
                    self._start(rank, chosen, max(now, free))
        return replace(self._table, actions=tuple(map(tuple, self._rows)))

    def _post(self, time: float, node: Node | None, microbatch: int) -> None:
        """At `time` one of the things that `node` waits for is there (None: a rank is free, look again)."""
        self._posted += 1
        heapq.heappush(self._arrivals, (time, self._posted, node, microbatch))

    def _arrive(self, node: Node, microbatch: int) -> None:
        left = self._waiting.pop((node, microbatch), self._missing[node]) - 1
        if left > 0:
            self._waiting[node, microbatch] = left
            return
        stage, kind = node
        entry = (self._key(stage, kind, microbatch), microbatch, stage)
        heapq.heappush(self._ready[self._table.stage_ranks[stage]][kind], entry)

    def _choose(self, rank: int) -> Action | None:
        for kind in self._kinds:
            queue = self._ready[rank][kind]
            refused = []
            chosen = None
            while queue and chosen is None:
                entry = heapq.heappop(queue)
                if kind is Kind.F and not self._budgets[rank].allows(entry[1]):
                    refused.append(entry)
                else:
                    chosen = Action(entry[2], kind, entry[1])
            for entry in refused:
                heapq.heappush(queue, entry)
            if chosen is not None:
                return chosen
        return None

    def _start(self, rank: int, action: Action, now: float) -> None:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        assert microbatch is not None
        self._rows[rank].append(action)
        end = self._free[rank] = now + self._takes[stage, kind]
        if kind is Kind.F:
            self._budgets[rank].take(microbatch)
        elif kind is not Kind.I:
            self._budgets[rank].free(microbatch)
        for node, delay in self._wakes[stage, kind]:
            self._post(end + delay, node, microbatch)
        if (stage, kind) == (0, Kind.F) and microbatch + 1 < self._table.num_microbatches:
            self._post(now, (0, Kind.F), microbatch + 1)
        self._post(end, None, 0)


def _who_wakes_whom(
    table: Schedule, costs: CostModel, kinds: Sequence[Kind]
) -> tuple[dict[Node, list[tuple[Node, float]]], dict[Node, int]]:
    """The dependency rule turned round: for each node whom it wakes after which delay; and how many wake each."""
    wakes: dict[Node, list[tuple[Node, float]]] = defaultdict(list)
    missing: dict[Node, int] = {(0, Kind.F): 1}
    for stage, rank in enumerate(table.stage_ranks):
        for kind in kinds:
            groups = waits_for(Action(stage, kind, 0), table.num_stages, num_chains=table.num_chains)
            for one_of in groups:
                other = next(action for action in one_of if action.kind in kinds)
                hop = costs.hop(table, min(stage, other.stage)) if table.stage_ranks[other.stage] != rank else 0.0
                wakes[other.stage, other.kind].append(((stage, kind), hop))
            missing[stage, kind] = max(1, len(groups))
    return wakes, missing
