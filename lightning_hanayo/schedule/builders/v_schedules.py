"""zbv: one wave with the backward split, in a fixed order (ZB-V, arXiv 2401.10241, section 6).

The order of torch.distributed.pipelining's ScheduleZBVZeroBubble. A rank's two stages are 0 (on the way down)
and 1 (on the way up). Rank d:

    2(P-d) - 1 times       F0
    d times                F1 F0
    P - d times            F1 I1 W1
    until all have begun   F0 I0 W0  F1 I1 W1
    d times                I0 I1                delays weight gradients, so that no rank waits for its input gradients
    P - d times            I0 W0
    the delayed W          W1 ... W0 ...

The peak is min(B, P) M_a. With F = I = W = 1 the makespan is the larger of 3B + (P-1)/2, the least that one wave can
take (so from B = 2P-1 on), and 2B + 2P-1: fewer micro-batches run in the order of 2P-1, without those beyond the last.

v-half and v-min: V schedules in a half and in a third of 1f1b's activations (arXiv 2405.15362, section 3).

A building block, the cells of one micro-batch, is repeated for all. A rank of a V holds stage 0 on the way down and
stage 1 on the way up. Its two F, I and W are six cells of one length, so the block repeats every six cells; W0 and W1
take the cells that are left:

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

In v-half a micro-batch takes two cells per rank down and one up, forward and backward alike:

    P = 3     cell     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16
              rank 0   F0                   F1 I1                      I0
              rank 1         F0          F1          I1             I0
              rank 2               F0 F1                   I1    I0

The longer F0 .. I0, the shorter F1 .. I1, so every rank holds about P/2. For even P the way back begins three cells
later, else F1 and I0 would collide. In v-min it takes one cell per rank, all the way there and back:

    P = 4     cell     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
              rank 0   F0                   F1       I1                   I0
              rank 1      F0             F1             I1             I0
              rank 2         F0       F1                   I1       I0
              rank 3            F0 F1                         I1 I0

F0 .. I0 and F1 .. I1 together last about 4P cells on every rank, so it holds 4P/6 stages. The way back begins 2 cells
later where 3 divides P-1, else 3: of the pauses of 0 to 3 cells these idle least in the compacted schedule.

              peak                    idle time (makespan - 3B) with F = I = W = 1 and B >= P
    v-half    min(B, (P+2) // 2)      3P/2 - 2 for odd P (P = 1: none), 3P/2 - 7/2 for even P (P = 2: 1/2)
    v-min     min(B, (P+4) // 3)      2P - 5/2, less 1 where 3 divides P, less 2 where 3 divides P+1
                                      (P = 1: none, P = 2: 1/2)

The peaks are those the authors print, and they print idle times of about 3P/2 and 2P. Their program idles as long for
v-half, and for v-min 2 longer where 3 divides P+1. Unequal costs leave v-half's steady state without a gap as long as
T_W + 2 T_I >= 2 T_F and T_W + 2 T_F >= 2 T_I; from P = 4 on they slow every period of v-min, as the authors say too.

dualpipev: one wave in which a forward and a backward run at once (DualPipe, arXiv 2412.19437; its V-shaped variant).

The order of torch.distributed.pipelining's ScheduleDualPipeV. A rank's two stages are 0 (on the way down) and 1 (on the
way up). Rank d, with r = P - 1 - d ranks below it; + runs both at once:

    2r times              F0
    d + 1 times           F0 F1
    r times               I1 W1 F1
    B - 2P + d + 1 times  F0+B1  F1+B0        the last rank's first F0 and B1 one after the other
    r times               B1  F1+B0
    d + 1 times           B1 B0               whole backwards, then split ones: I1 I0
    r times               W I0                a weight gradient that was left, and B0 while backwards are whole
    the rest              W ...

A rank holds at most P + 1/2 M_a: a micro-batch of one stage more than in zbv, which a pair needs.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule
from lightning_hanayo.schedule.table import Action, Kind, waits_for, zigzag

_F0, _I0, _W0 = _DOWN = tuple((0, kind) for kind in (Kind.F, Kind.I, Kind.W))
_F1, _I1, _W1 = _UP = tuple((1, kind) for kind in (Kind.F, Kind.I, Kind.W))


@register_schedule("zbv", depth="two")
def zbv(request: Request) -> Schedule:
    """Two stages per rank."""
    request.stages_per_rank(2)
    rows = tuple(_row(rank, request.num_ranks, request.num_microbatches) for rank in range(request.num_ranks))
    return Schedule(request.name, zigzag(request.num_ranks, 1), rows, request.num_microbatches)


def _row(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """Each stage and kind takes its micro-batches in order; those beyond the last are left out."""
    below = num_ranks - rank
    whole = max(num_microbatches, 2 * num_ranks - 1)
    order = [_F0] * (2 * below - 1) + [_F1, _F0] * rank + [_F1, _I1, _W1] * below
    order += [*_DOWN, *_UP] * (whole - num_ranks)
    order += [_I0, _I1] * rank + [_I0, _W0] * below + [_W1] * rank + [_W0] * rank
    stages = (rank, 2 * num_ranks - 1 - rank)
    microbatch = {leg_and_kind: count() for leg_and_kind in (*_DOWN, *_UP)}
    actions = (Action(stages[leg], kind, next(microbatch[leg, kind])) for leg, kind in order)
    return tuple(action for action in actions if action.microbatch in range(num_microbatches))


PERIOD = 6

Node = tuple[int, Kind]
"""The stage and kind of an action."""

Cells = tuple[int, int, int, int]
"""The cells of F0, F1, I1 and I0 of micro-batch 0 on a rank; those of micro-batch m come `PERIOD` m cells later."""


@register_schedule("v-half", depth="two")
def v_half(request: Request) -> Schedule:
    """Two stages per rank, at most (P+2) // 2 M_a."""
    num_ranks = request.num_ranks
    down, back = 3 * num_ranks - 2, 3 * num_ranks + (3 if num_ranks % 2 == 0 else 0)
    block = [(2 * rank, down - rank, back - 1 + 2 * rank, back + down - rank) for rank in range(num_ranks)]
    return repeat(request, block, (num_ranks + 2) // 2, eager=False)


@register_schedule("v-min", depth="two")
def v_min(request: Request) -> Schedule:
    """Two stages per rank, at most (P+4) // 3 M_a."""
    num_ranks = request.num_ranks
    down, back = 2 * num_ranks - 1, 2 * num_ranks + (2 if num_ranks % 3 == 1 else 3)
    block = [(rank, down - rank, back + rank, back + down - rank) for rank in range(num_ranks)]
    return repeat(request, block, (num_ranks + 4) // 3, eager=True)


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
    """One rank while the schedule is compacted: its row so far, the activations it holds, and its pending W."""

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
        until = self._next(node)
        ends = {other: min(until, first + PERIOD * self._num_microbatches) for other, first in self.cells.items()}
        before = ((at, other[1]) for other in ends for at in range(self._next(other), ends[other], PERIOD))
        for _, kind in sorted(before):
            level += 1 if kind is Kind.F else -1
            peak = max(peak, level)
        return peak < self._most_stages

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


_Cell = tuple[tuple[int, Kind], ...]
"""one or two computations: of each whether its stage is on the way up, and its kind"""
_DOWN_F, _UP_F, _B0, _B1 = ((leg, kind) for kind in (Kind.F, Kind.B) for leg in (0, 1))
_W = (-1, Kind.W)
"""the weight gradient that has waited longest, of either stage"""


@register_schedule("dualpipev", depth="two")
def dualpipev(request: Request) -> Schedule:
    """Two stages per rank, and at least as many micro-batches as stages."""
    request.stages_per_rank(2)
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    if num_microbatches < 2 * num_ranks:
        needed = f"at least one micro-batch per stage, {2 * num_ranks} on {num_ranks} ranks"
        raise HanayoError(f"'dualpipev' needs {needed}, got {num_microbatches}; 'hanayo-zb' takes any number")
    rows, pairs = [], []
    for rank in range(num_ranks):
        cells = list(_actions(rank, num_ranks, num_microbatches))
        rows.append(tuple(action for cell in cells for action in cell))
        pairs += [(cell[0], cell[1]) for cell in cells if len(cell) == 2]
    stage_ranks = zigzag(num_ranks, 1)
    return Schedule(request.name, stage_ranks, tuple(rows), num_microbatches, pairs=frozenset(pairs))


def _actions(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[tuple[Action, ...]]:
    """The cells of a rank's row. Each stage and kind takes its micro-batches in order."""
    stages = rank, 2 * num_ranks - 1 - rank
    done: Counter[tuple[int, Kind]] = Counter()
    left: list[Action] = []
    for cell in _cells(rank, num_ranks, num_microbatches):
        made = []
        for leg, kind in cell:
            if kind is Kind.W:
                if left:
                    made.append(left.pop(0))
                continue
            direction = Kind.F if kind is Kind.F else Kind.B
            action = Action(stages[leg], kind, done[leg, direction])
            done[leg, direction] += 1
            made.append(action)
            if kind is Kind.I:
                left.append(Action(action.stage, Kind.W, action.microbatch))
        if made:
            yield tuple(made)


def _cells(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[_Cell]:
    below = num_ranks - 1 - rank
    yield from [(_DOWN_F,)] * (2 * below)
    yield from [(_DOWN_F,), (_UP_F,)] * (rank + 1)
    yield from [((1, Kind.I),), (_W,), (_UP_F,)] * below
    for place in range(num_microbatches - 2 * num_ranks + rank + 1):
        yield from [(_DOWN_F,), (_B1,)] if place == 0 and below == 0 else [(_DOWN_F, _B1)]
        yield (_UP_F, _B0)
    yield from [(_B1,), (_UP_F, _B0)] * below
    splits = False
    for place in range(rank + 1):
        is_middle = place == (rank + 1) // 2
        splits |= is_middle and rank % 2 == 1
        yield ((1, Kind.I if splits else Kind.B),)
        splits |= is_middle and rank % 2 == 0
        yield ((0, Kind.I if splits else Kind.B),)
    yield from [(_W,), ((0, Kind.I if splits else Kind.B),)] * below
    yield from [(_W,)] * (rank + 1)
