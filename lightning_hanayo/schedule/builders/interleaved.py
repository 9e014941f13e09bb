"""interleaved and interleaved-zb: V stages per rank in a loop, with whole or split backwards, for any B.

Micro-batches run in groups of G: a rank runs its first stage for the whole group, then its second, and so on. G is P
where P divides B. Where torch.distributed.pipelining has an order for these sizes, this is the same one.

interleaved is 1f1b with these groups (Megatron-LM, arXiv 2104.04473, section 2.2):

    P = 2, V = 2     rank 0   0F0 0F1 2F0 2F1 ...
                     rank 1       1F0 1F1 3F0 ...

interleaved-zb splits backwards and delays weight gradients (ZB1P of arXiv 2401.10241). Rank d runs (V-1) G + P-1-d
forwards before its first input gradient; then F and I take turns, and once d weight gradients are pending the oldest
follows each I:

    P = 2, V = 2     rank 0   0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 ...
    G = 2            rank 1       1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 ...

Where G is P, with F = I = W, its makespan is B (T_F + T_B) + (P-1) T_F/V, the least that a loop of V stages per rank
can take, and no rank holds more than P M_a. Other B >= P that torch accepts idle no longer, in groups of more than P,
and hold ((V-1) G + P)/V M_a.
"""

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.builders.one_f_one_b import alternate
from lightning_hanayo.schedule.placement import loop
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule


@register_schedule("interleaved", depth="stages")
def interleaved(request: Request) -> Schedule:
    """V stages per rank (default 2), whole backwards."""
    num_ranks, size = request.num_ranks, group_size(request.num_ranks, request.num_microbatches)
    stages_per_rank = request.stages_per_rank(None)
    rows = []
    for rank in range(num_ranks):
        forward, backward = _orders(rank, request, stages_per_rank, Kind.B)
        rows.append(alternate(forward, backward, 2 * (num_ranks - 1 - rank) + (stages_per_rank - 1) * size + 1))
    return _schedule(request, stages_per_rank, rows)


@register_schedule("interleaved-zb", depth="stages")
def interleaved_zb(request: Request) -> Schedule:
    """V stages per rank (default 2), split backwards."""
    return split_loop(request, request.stages_per_rank(None))


def split_loop(request: Request, stages_per_rank: int) -> Schedule:
    """The order of interleaved-zb; with one stage per rank it is zb-h1."""
    num_ranks, size = request.num_ranks, group_size(request.num_ranks, request.num_microbatches)
    rows = []
    for rank in range(num_ranks):
        forward, backward = _orders(rank, request, stages_per_rank, Kind.I)
        rows.append(_delayed_weights_row(forward, backward, (stages_per_rank - 1) * size + num_ranks - 1 - rank, rank))
    return _schedule(request, stages_per_rank, rows)


def group_size(num_ranks: int, num_microbatches: int) -> int:
    """G, as in torch: B divided into as many equal groups of at least P as possible. Else P, with a smaller last group.

    Example:
        >>> [group_size(4, num_microbatches) for num_microbatches in (3, 4, 7, 8, 9, 10)]
        [3, 4, 7, 4, 4, 5]
    """
    count = max(1, num_microbatches // num_ranks)
    return num_ranks if num_microbatches % count else num_microbatches // count


def _orders(rank: int, request: Request, stages_per_rank: int, backward: Kind) -> tuple[list[Action], list[Action]]:
    """The rank's forwards and backwards in whole groups."""
    size = group_size(request.num_ranks, request.num_microbatches)
    groups = [range(start, start + size) for start in range(0, request.num_microbatches, size)]
    stages = range(rank, stages_per_rank * request.num_ranks, request.num_ranks)
    return (
        [Action(stage, Kind.F, m) for group in groups for stage in stages for m in group],
        [Action(stage, backward, m) for group in groups for stage in stages[::-1] for m in group],
    )


def _delayed_weights_row(forward: list[Action], backward: list[Action], ahead: int, delay: int) -> list[Action]:
    """`ahead` forwards; then F, I and the W that is `delay` places behind take turns until all have run."""
    row = forward[:ahead]
    weights = [Action(action.stage, Kind.W, action.microbatch) for action in backward]
    for turn in range(len(backward) + delay):
        row += forward[turn + ahead : turn + ahead + 1] + backward[turn : turn + 1]
        row += weights[max(0, turn - delay) : max(0, turn - delay + 1)]
    return row


def _schedule(request: Request, stages_per_rank: int, rows: list[list[Action]]) -> Schedule:
    """The schedule without the micro-batches beyond the last one. Leaving them out can't deadlock."""
    microbatches = range(request.num_microbatches)
    kept = tuple(tuple(action for action in row if action.microbatch in microbatches) for row in rows)
    return Schedule(request.name, loop(request.num_ranks, stages_per_rank), kept, request.num_microbatches)
