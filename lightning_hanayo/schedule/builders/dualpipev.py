"""dualpipev: one wave in which a forward and a backward run at once (DualPipe, arXiv 2412.19437; its V-shaped variant).

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

from collections import Counter
from collections.abc import Iterator

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.placement import zigzag
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule

_Cell = tuple[tuple[int, Kind], ...]
"""one or two computations: of each whether its stage is on the way up, and its kind"""
_F0, _F1, _B0, _B1 = ((leg, kind) for kind in (Kind.F, Kind.B) for leg in (0, 1))
_W = (-1, Kind.W)
"""the weight gradient that has waited longest, of either stage"""


@register_schedule("dualpipev", depth="two")
def dualpipev(request: Request) -> Schedule:
    """Two stages per rank, and at least as many micro-batches as stages."""
    request.stages_per_rank(2)
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    if num_microbatches < 2 * num_ranks:
        raise HanayoError(
            f"schedule 'dualpipev' needs at least one micro-batch per stage, {2 * num_ranks} on {num_ranks} ranks, got "
            f"{num_microbatches}; 'hanayo-zb' takes any number"
        )
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
    yield from [(_F0,)] * (2 * below)
    yield from [(_F0,), (_F1,)] * (rank + 1)
    yield from [((1, Kind.I),), (_W,), (_F1,)] * below
    for place in range(num_microbatches - 2 * num_ranks + rank + 1):
        yield from [(_F0,), (_B1,)] if place == 0 and below == 0 else [(_F0, _B1)]
        yield (_F1, _B0)
    yield from [(_B1,), (_F1, _B0)] * below
    splits = False
    for place in range(rank + 1):
        is_middle = place == (rank + 1) // 2
        splits |= is_middle and rank % 2 == 1
        yield ((1, Kind.I if splits else Kind.B),)
        splits |= is_middle and rank % 2 == 0
        yield ((0, Kind.I if splits else Kind.B),)
    yield from [(_W,), ((0, Kind.I if splits else Kind.B),)] * below
    yield from [(_W,)] * (rank + 1)
