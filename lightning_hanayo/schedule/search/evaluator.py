"""Evaluator: computes when each action of a table starts and ends, fast enough for thousands of tables.

An action is one whole number, its code. The actions it waits for have codes at fixed distances, for every micro-batch:

    code = (kind * S + stage) * B + microbatch        kinds in the order F, I, W, B

    0F0 0F1 0F2 | 1F0 1F1 1F2 | 0I0 0I1 0I2 | 1I0 1I1 1I2 | 0W0 ...         S = 2, B = 3
         ^-----------'  1F1 waits for the code B positions to its left

SchedulingProblem: the sizes, costs and activation limit for which a search orders actions, as numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import inf

from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.table import Action, Kind, Table, waits_for


@dataclass(frozen=True, slots=True)
class SchedulingProblem:
    """Actions have the codes of `Evaluator`: (kind S + stage) B + micro-batch, the kinds F, I, W."""

    stage_ranks: tuple[int, ...]
    num_microbatches: int
    times: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    """of each stage's F, I and W"""
    hops: tuple[float, ...]
    """the time of a message from stage s to s + 1 or back; 0 within a rank"""
    capacity: int
    """the most activations a rank may hold, counted in stages"""
    split: bool = True
    """whether a backward has two parts; else I is the whole backward, and there is no W"""
    forwards_first: bool = False
    """whether the last stage's first backward waits for all forwards, for a loss of all micro-batches together"""

    @classmethod
    def of(
        cls, shape: Table, costs: CostModel, budget: float, split: bool = True, *, forwards_first: bool = False
    ) -> "SchedulingProblem":
        """The problem of ordering the actions of `shape` within `budget` M_a. The actions it has don't matter."""
        ranks, stages = shape.stage_ranks, range(shape.num_stages)

        def times(kind: Kind) -> tuple[float, ...]:
            return tuple(costs.of(shape, Action(stage, kind, 0)) for stage in stages)

        hops = (0.0 if here == there else costs.hop(shape, s) for s, (here, there) in enumerate(pairwise(ranks)))
        capacity = int(min(budget, shape.num_microbatches) * len(shape.stages_of(0)) + 1e-9)
        kinds = times(Kind.F), times(Kind.I if split else Kind.B), times(Kind.W)
        return cls(ranks, shape.num_microbatches, kinds, tuple(hops), capacity, split, forwards_first)

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
        """Actions on all ranks. The effort of one run of the list scheduler is proportional to it."""
        return (2 + self.split) * self.num_stages * self.num_microbatches

    def rows(self, keys: Sequence[float]) -> list[list[int]]:
        """Each rank's codes in the order of their keys. `keys` has one entry per code, of the first kinds or of all."""
        rows: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for code in range(len(keys)):
            rows[self.stage_ranks[code // self.num_microbatches % self.num_stages]].append(code)
        for row in rows:
            row.sort(key=keys.__getitem__)
        return rows


_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)
_BASE = {kind: base for base, kind in enumerate(_KINDS)}

CodeRows = Sequence[Sequence[int]]
"""A table as codes, one row per rank."""


@dataclass(frozen=True, slots=True)
class ActionTimes:
    """When each action of some rows starts and ends (lists of the rows' shape), and each rank's last end."""

    starts: list[list[float]]
    ends: list[list[float]]
    last: list[float]

    @property
    def makespan(self) -> float:
        """The last end of all ranks, counted from time 0."""
        return max(self.last)


class Evaluator:
    """Times tables that share placement, micro-batches and costs with `shape`, whose own actions don't matter.

    Example:
        >>> evaluator = Evaluator(schedule, CostModel(message=0.1))
        >>> rows = evaluator.encode(schedule.actions)
        >>> evaluator.makespan(rows)            # equals simulate(schedule, CostModel(message=0.1)).makespan
    """

    def __init__(self, shape: Table, costs: CostModel) -> None:
        self._num_stages, self._num_microbatches = shape.num_stages, shape.num_microbatches
        self._num_ranks = shape.num_ranks
        stages = range(shape.num_stages)
        self._nodes = [_node(shape, costs, Action(stage, kind, 0)) for kind in _KINDS for stage in stages]
        self._pair_ends = cache(lambda first, second: costs.pair(shape, self._at(first), self._at(second)))
        self._pairs = {self.code(first): self.code(second) for first, second in shape.pairs}

    def code(self, action: Action) -> int:
        """The number of a compute action of this shape."""
        assert action.microbatch is not None
        return (_BASE[action.kind] * self._num_stages + action.stage) * self._num_microbatches + action.microbatch

    def action(self, code: int) -> Action:
        """The action of a number."""
        node, microbatch = divmod(code, self._num_microbatches)
        kind, stage = divmod(node, self._num_stages)
        return Action(stage, _KINDS[kind], microbatch)

    def _at(self, node: int) -> Action:
        return self.action(node * self._num_microbatches)

    def encode(self, rows: Iterable[Iterable[Action]]) -> list[list[int]]:
        """The codes of a table's actions."""
        return [list(map(self.code, row)) for row in rows]

    def decode(self, rows: CodeRows) -> tuple[tuple[Action, ...], ...]:
        """The actions of a table's codes."""
        return tuple(tuple(map(self.action, row)) for row in rows)

    def fused(self, rows: CodeRows) -> list[list[int]]:
        """The same rows with each I replaced by a whole backward."""
        kind = self._num_stages * self._num_microbatches
        return [[code if code < kind else code + 2 * kind for code in row] for row in rows]

    def makespan(self, rows: CodeRows, pairs: Mapping[int, int] | None = None) -> float:
        """How long the table takes; infinity if its ranks deadlock."""
        times = self.run(rows, pairs=pairs)
        return inf if times is None else times.makespan

    def run(
        self, rows: CodeRows, begin: Sequence[float] | None = None, pairs: Mapping[int, int] | None = None
    ) -> ActionTimes | None:
        """Start each action as soon as its rank is free and its inputs have arrived. None: the ranks deadlock.

        A pair starts when the inputs of both have arrived. Linear: a rank that waits is woken by the missing input. Of
        the table only dependencies are checked.

        Args:
            rows: of each rank, in order.
            begin: when each rank may start, at least 0 (default 0).
            pairs: neighbours in a row that run at once (default: those of the shape).
        """
        pairs = self._pairs if pairs is None else pairs
        nodes, num_microbatches = self._nodes, self._num_microbatches
        done = [-1.0] * (3 * self._num_stages * num_microbatches)  # ends by slot; -1: not run yet
        last = list(begin or [0.0] * self._num_ranks)
        starts: list[list[float]] = [[] for _ in rows]
        ends: list[list[float]] = [[] for _ in rows]
        asleep: dict[int, list[int]] = {}
        awake = list(range(len(rows)))[::-1]
        while awake:
            rank = awake.pop()
            time, row, row_starts, row_ends = last[rank], rows[rank], starts[rank], ends[rank]
            while len(row_ends) < len(row):
                code = row[len(row_ends)]
                takes, slot, waits = nodes[code // num_microbatches]
                second = pairs.get(code)
                if second is not None:
                    takes, *of_second = self._pair_ends(code // num_microbatches, second // num_microbatches)
                    more = nodes[second // num_microbatches][2]
                    waits = (*waits, *((second - code + distance, hop) for distance, hop in more))
                start = time
                for distance, hop in waits:
                    arrival = done[code + distance]
                    if arrival < 0:  # who makes it wakes this rank
                        asleep.setdefault(code + distance, []).append(rank)
                        break
                    arrival += hop
                    if arrival > start:
                        start = arrival
                else:
                    time = start + takes
                    row_starts.append(start)
                    row_ends.append(time)
                    done[code + slot] = time
                    if code + slot in asleep:
                        awake += asleep.pop(code + slot)
                    if second is not None:
                        end = start + of_second[0]
                        row_starts.append(start)
                        row_ends.append(end)
                        second += nodes[second // num_microbatches][1]
                        done[second] = end
                        awake += asleep.pop(second, ())
                        time = max(time, end)
                    continue
                break
            last[rank] = time
        # no rank is awake: all have ended, or wait for each other
        stuck = any(len(row) > len(row_ends) for row, row_ends in zip(rows, ends, strict=True))
        return None if stuck else ActionTimes(starts, ends, last)


Node = tuple[float, int, tuple[tuple[int, float], ...]]
"""Common to all micro-batches of a (stage, kind): its time; the distance from its code to the slot that holds its end;
and, for each thing it waits for, the distance to that slot and the time of the hop from there."""


def _node(shape: Table, costs: CostModel, action: Action) -> Node:
    code = (_BASE[action.kind] * shape.num_stages + action.stage) * shape.num_microbatches
    waits = []
    for one_of in waits_for(action, shape.num_stages):
        (slot,) = {_slot(shape, other) for other in one_of}
        other = one_of[-1]
        near = shape.stage_ranks[other.stage] == shape.stage_ranks[action.stage]
        hop = 0.0 if near else costs.hop(shape, min(other.stage, action.stage))
        waits.append((slot - code, hop))
    return costs.of(shape, action), _slot(shape, action) - code, tuple(waits)


def _slot(shape: Table, action: Action) -> int:
    """The slot that holds the end of micro-batch 0. `B` and `I` share one, as both make the input's gradient."""
    kind = Kind.I if action.kind is Kind.B else action.kind
    return (_BASE[kind] * shape.num_stages + action.stage) * shape.num_microbatches
