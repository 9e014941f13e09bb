"""interleaved-zb: interleaved with the backward split and weight gradients delayed (ZB1P of arXiv 2401.10241).

The order of torch.distributed.pipelining's ScheduleInterleavedZeroBubble for every B it accepts, and an order for any
other B. Rank d runs (V-1) G + P-1-d forwards before its first input gradient, in groups of G micro-batches; then F and
I take turns, and once d weight gradients are pending the oldest follows each I:

    P = 2, V = 2     rank 0   0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 ...
    G = 2            rank 1       1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 ...

G is P where P divides B. Then, with F = I = W, the makespan is B (T_F + T_B) + (P-1) T_F/V, the least that a loop of V
stages per rank can take, and no rank holds more than P M_a. Other B >= P that torch accepts idle no longer, in groups
of more than P, and hold ((V-1) G + P)/V M_a.
"""

from collections.abc import Sequence

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.builders.interleaved import group_size
from lightning_hanayo.schedule.placement import loop
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule

StageOrder = Sequence[tuple[int, int]]
"""(stage, micro-batch), in the order in which a rank runs them."""


@register_schedule("interleaved-zb", depth="stages")
def interleaved_zb(request: Request) -> Schedule:
    """V stages per rank (default 2)."""
    request.refuse_waves()
    stages_per_rank = request.stages_per_rank(None, default=2)
    rows = tuple(_row(rank, request, stages_per_rank) for rank in range(request.num_ranks))
    return Schedule(request.name, loop(request.num_ranks, stages_per_rank), rows, request.num_microbatches)


def _row(rank: int, request: Request, stages_per_rank: int) -> tuple[Action, ...]:
    """The order for whole groups, without the micro-batches beyond the last one. Leaving them out can't deadlock."""
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    size = group_size(num_ranks, num_microbatches)
    groups = [range(start, start + size) for start in range(0, num_microbatches, size)]
    stages = [chunk * num_ranks + rank for chunk in range(stages_per_rank)]
    forward = [(stage, m) for group in groups for stage in stages for m in group]
    backward = [(stage, m) for group in groups for stage in stages[::-1] for m in group]
    whole = delayed_weights_row(
        forward, backward, ahead=size * (stages_per_rank - 1) + num_ranks - 1 - rank, delay=rank
    )
    return tuple(action for action in whole if action.microbatch in range(num_microbatches))


def delayed_weights_row(forward: StageOrder, backward: StageOrder, ahead: int, delay: int) -> tuple[Action, ...]:
    """`ahead` forwards; then F, I and the W that is `delay` places behind take turns until all have run."""
    row = [Action(stage, Kind.F, m) for stage, m in forward[:ahead]]
    for turn in range(len(backward) + delay):
        row += [Action(stage, Kind.F, m) for stage, m in forward[turn + ahead : turn + ahead + 1]]
        row += [Action(stage, Kind.I, m) for stage, m in backward[turn : turn + 1]]
        row += [Action(stage, Kind.W, m) for stage, m in backward[max(0, turn - delay) : max(0, turn - delay + 1)]]
    return tuple(row)
