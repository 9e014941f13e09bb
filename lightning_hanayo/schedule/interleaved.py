"""interleaved: 1f1b over V stages per rank in a loop (Megatron-LM, arXiv 2104.04473, section 2.2), for any B.

Micro-batches run in groups of P: a rank runs its first stage for the whole group, then its second, and so on.

    P = 2, V = 2     rank 0   0F0 0F1 2F0 2F1 ...
                     rank 1       1F0 1F1 3F0 ...
"""

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.one_f_one_b import alternate
from lightning_hanayo.schedule.placement import loop
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.table import Schedule


@register_schedule("interleaved", depth="stages")
def interleaved(request: Request) -> Schedule:
    """V stages per rank (default 2), their order as in the picture."""
    request.refuse_waves()
    stages_per_rank = request.stages_per_rank(None, default=2)
    rows = tuple(_row(rank, request, stages_per_rank) for rank in range(request.num_ranks))
    return Schedule(request.name, loop(request.num_ranks, stages_per_rank), rows, request.num_microbatches)


def _row(rank: int, request: Request, stages_per_rank: int) -> tuple[Action, ...]:
    """The order for whole groups of P, without the micro-batches beyond the last: what is left still can't deadlock."""
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    groups = [range(start, start + num_ranks) for start in range(0, num_microbatches, num_ranks)]
    chunks = range(stages_per_rank)
    forward = [Action(c * num_ranks + rank, Kind.F, m) for g in groups for c in chunks for m in g]
    backward = [Action(c * num_ranks + rank, Kind.B, m) for g in groups for c in chunks[::-1] for m in g]
    warm_up = 2 * (num_ranks - 1 - rank) + (stages_per_rank - 1) * num_ranks + 1
    whole = alternate(forward, backward, warm_up)
    return tuple(action for action in whole if action.microbatch in range(num_microbatches))
