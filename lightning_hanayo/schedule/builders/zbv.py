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
"""

from itertools import count

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.placement import zigzag
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule

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
