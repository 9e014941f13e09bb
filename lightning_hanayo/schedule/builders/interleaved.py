"""interleaved: 1f1b with V stages per rank in a loop (Megatron-LM, arXiv 2104.04473, section 2.2), for any B.

Micro-batches run in groups of G: a rank runs its first stage for the whole group, then its second, and so on. G is P
where P divides B. Where torch.distributed.pipelining has an order for these sizes, this is the same one.

    P = 2, V = 2     rank 0   0F0 0F1 2F0 2F1 ...
                     rank 1       1F0 1F1 3F0 ...
"""

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.builders.one_f_one_b import alternate
from lightning_hanayo.schedule.placement import loop
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule


@register_schedule("interleaved", depth="stages")
def interleaved(request: Request) -> Schedule:
    """V stages per rank (default 2)."""
    request.refuse_waves()
    stages_per_rank = request.stages_per_rank(None, default=2)
    rows = tuple(_row(rank, request, stages_per_rank) for rank in range(request.num_ranks))
    return Schedule(request.name, loop(request.num_ranks, stages_per_rank), rows, request.num_microbatches)


def group_size(num_ranks: int, num_microbatches: int) -> int:
    """G, as in torch: B divided into as many equal groups of at least P as possible. Else P, with a smaller last group.

    Example:
        >>> [group_size(4, num_microbatches) for num_microbatches in (3, 4, 7, 8, 9, 10)]
        [3, 4, 7, 4, 4, 5]
    """
    count = max(1, num_microbatches // num_ranks)
    return num_ranks if num_microbatches % count else num_microbatches // count


def _row(rank: int, request: Request, stages_per_rank: int) -> tuple[Action, ...]:
    """The order for whole groups, without the micro-batches beyond the last one. Leaving them out can't deadlock."""
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    size = group_size(num_ranks, num_microbatches)
    groups = [range(start, start + size) for start in range(0, num_microbatches, size)]
    chunks = range(stages_per_rank)
    forward = [Action(c * num_ranks + rank, Kind.F, m) for g in groups for c in chunks for m in g]
    backward = [Action(c * num_ranks + rank, Kind.B, m) for g in groups for c in chunks[::-1] for m in g]
    warm_up = 2 * (num_ranks - 1 - rank) + (stages_per_rank - 1) * size + 1
    whole = alternate(forward, backward, warm_up)
    return tuple(action for action in whole if action.microbatch in range(num_microbatches))
