"""Building block: makes a schedule from the cells of one micro-batch, repeated for all (arXiv 2405.15362).

A rank of a V holds stage 0 on the way down and stage 1 on the way up. Its two F, I and W are six cells of one length,
so the block repeats every six cells; W0 and W1 take the cells that are left:

    P = 2     cell     0  1  2  3  4  5  6  7
              rank 0   F0       F1 I1       I0          F0 .. I0 and F1 .. I1 last 8 cells together on either rank, so
              rank 1      F0 F1       I1 I0             8/6 stages are held on average, for any number of micro-batches

The block fixes the order and so the memory. Then the schedule is compacted: each rank runs in the block's order, and
when the next action can't run yet, it runs the first of these that can:

    an I, once all its F have run        only the way back is left
    the oldest W whose I has run
    an I, if the block is `eager`        V-Half keeps its pauses: messages travel in them
    an F                                 that leaves memory for all that comes before it in the block's order

That can't deadlock: of the actions not yet done, everything that the one with the earliest cell waits for is done, and
there is memory for it once the pending W have run.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.dependency import waits_for
from lightning_hanayo.schedule.placement import zigzag
from lightning_hanayo.schedule.registry import Request
from lightning_hanayo.schedule.schedule import Schedule

PERIOD = 6

Node = tuple[int, Kind]
"""The stage and kind of an action."""

Cells = tuple[int, int, int, int]
"""The cells of F0, F1, I1 and I0 of micro-batch 0 on a rank; those of micro-batch m come `PERIOD` m cells later."""


def repeat(request: Request, block: Sequence[Cells], capacity: int, *, eager: bool) -> Schedule:
    """The block (each rank's cells), repeated for all micro-batches and compacted.

    A rank holds at most `capacity` M_a; the block must fit if each W comes right after its I. If `eager`, an I may run
    early while forwards are left.
    """
    num_microbatches, stages = request.num_microbatches, request.stages_per_rank(2) * request.num_ranks
    ranks = []
    for rank, cells in enumerate(block):
        nodes = (rank, Kind.F), (stages - 1 - rank, Kind.F), (stages - 1 - rank, Kind.I), (rank, Kind.I)
        ranks.append(_Rank(dict(zip(nodes, cells, strict=True)), stages, num_microbatches, capacity, eager))
    done = dict.fromkeys((node for rank in ranks for node in rank.cells), 0)
    while any(len(rank.row) < 6 * num_microbatches for rank in ranks):
        for node in [rank.step(done) for rank in ranks]:
            if node is not None:
                done[node] += 1
    return Schedule(
        request.name, zigzag(request.num_ranks, 1), tuple(tuple(rank.row) for rank in ranks), num_microbatches
    )


class _Rank:
    """One rank while the schedule is compacted: what it has run, the activations it holds, and its pending W."""

    def __init__(self, cells: dict[Node, int], stages: int, num_microbatches: int, capacity: int, eager: bool) -> None:
        self.cells = cells
        self.row: list[Action] = []
        self._waits = {node: _waits(node, stages) for node in cells}
        self._begun = dict.fromkeys(cells, 0)
        self._pending: deque[Action] = deque()
        self._held = 0
        self._most_stages = 2 * capacity
        self._num_microbatches = num_microbatches
        self._eager = eager

    def step(self, done: Mapping[Node, int]) -> Node | None:
        """Run one action and return it, if it is an F or I. `done`: how many micro-batches each F and I has run."""
        left = sorted((node for node, begun in self._begun.items() if begun < self._num_microbatches), key=self._next)
        can = [node for node in left if all(done[other] > self._begun[node] for other in self._waits[node])]
        if can and can[0] == left[0] and self._fits(can[0]):
            return self._run(can[0])
        backward = [node for node in can if node[1] is Kind.I]
        if backward and all(kind is Kind.I for _, kind in left):
            return self._run(backward[0])
        if self._pending:
            self._held -= 1
            self.row.append(self._pending.popleft())
            return None
        if backward and self._eager:
            return self._run(backward[0])
        forward = (node for node in can if node[1] is Kind.F and self._fits(node))
        return self._run(node) if (node := next(forward, None)) is not None else None

    def _next(self, node: Node) -> int:
        """The cell of the next micro-batch of `node`."""
        return self.cells[node] + PERIOD * self._begun[node]

    def _fits(self, node: Node) -> bool:
        """Whether `node` may run now and leave memory for all that comes before it in the block's order."""
        if node[1] is Kind.I:
            return True
        level = peak = self._held
        for _, kind in self._before(self._next(node)):
            level += 1 if kind is Kind.F else -1
            peak = max(peak, level)
        return peak < self._most_stages

    def _before(self, cell: int) -> list[tuple[int, Kind]]:
        ends = {node: min(cell, first + PERIOD * self._num_microbatches) for node, first in self.cells.items()}
        return sorted((at, node[1]) for node in ends for at in range(self._next(node), ends[node], PERIOD))

    def _run(self, node: Node) -> Node:
        (stage, kind), microbatch = node, self._begun[node]
        self._begun[node] += 1
        self.row.append(Action(stage, kind, microbatch))
        if kind is Kind.F:
            self._held += 1
        else:
            self._pending.append(Action(stage, Kind.W, microbatch))
        return node


def _waits(node: Node, stages: int) -> list[Node]:
    """The F and I that an F or I waits for."""
    groups = waits_for(Action(*node, 0), stages)
    return [next((other.stage, other.kind) for other in one_of if other.kind in (Kind.F, Kind.I)) for one_of in groups]
