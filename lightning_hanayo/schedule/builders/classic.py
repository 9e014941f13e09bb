"""gpipe: all forwards, then all backwards (GPipe, arXiv 1811.06965).

rank 0   F0 F1 F2 F3 .  .  .  .     .     .     B0    B1    B2    B3
rank 1      F0 F1 F2 F3 .  .     .        B0    B1    B2    B3

1f1b: one forward and one backward in turn, after a warm-up (DAPPLE, PipeDream-flush).

P = 3     rank 0   F0 F1 F2 .  .     .     B0    F3 B1    ...      warm-up of P - rank forwards
          rank 1      F0 F1 .     B0    F2 B1    F3 B2    ...
          rank 2         F0 B0    F1 B1    F2 B2    F3 B3

interleaved, interleaved-zb and zb-h1: stages in a loop over the ranks, with whole or split backwards, for any B.

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

zb-h1 is interleaved-zb with one stage per rank: 1f1b with the backward split, in its memory (arXiv 2401.10241, section
2.1). The later ranks send input gradients without a pause, and run their delayed weight gradients when 1f1b would idle:

    P = 3     rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 ...
              rank 1      F0 F1 .  I0 F2 I1 W0 F3 I2 W1 ...
              rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 ...

For B >= P the makespan is B (T_F + T_I + T_W) + (P-1) max(T_F, T_I, T_F + T_I - T_W); the paper prints the last of the
three, and it is the largest where T_W is at most T_F and T_I. With F = I = W that is a third of 1f1b's idle time. For
fewer micro-batches it is 2B + 2P - 1, at F = I = W = 1. The peak is min(B, P) M_a.
"""

from lightning_hanayo.schedule.communication import forwards_before_backwards
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule
from lightning_hanayo.schedule.table import Action, Kind, loop


@register_schedule("gpipe")
def gpipe(request: Request) -> Schedule:
    """One stage per rank; activations grow to B M_a."""
    return forwards_before_backwards(one_f_one_b(request))


@register_schedule("1f1b")
def one_f_one_b(request: Request) -> Schedule:
    """One stage per rank; activations of at most P - rank M_a."""
    return _interleave(request, request.stages_per_rank(1))


@register_schedule("interleaved", depth="stages")
def interleaved(request: Request) -> Schedule:
    """V stages per rank (default 2), whole backwards."""
    return _interleave(request, request.stages_per_rank(None), lead=2)


@register_schedule("interleaved-zb", depth="stages")
def interleaved_zb(request: Request) -> Schedule:
    """V stages per rank (default 2), split backwards."""
    return _interleave(request, request.stages_per_rank(None), split=True)


@register_schedule("zb-h1")
def zb_h1(request: Request) -> Schedule:
    """One stage per rank, split backwards."""
    return _interleave(request, request.stages_per_rank(1), split=True)


def _interleave(request: Request, stages_per_rank: int, *, lead: int = 1, split: bool = False) -> Schedule:
    """The order for whole groups, without the micro-batches beyond the last one. Leaving them out can't deadlock.

    Before forwards and backwards take turns, a rank runs the forwards of a group on all its stages but the last, and
    `lead` more for each rank below it. If `split`, the weight gradient that is `rank` places behind takes a turn, too.
    """
    num_ranks, microbatches = request.num_ranks, range(request.num_microbatches)
    size = group_size(num_ranks, len(microbatches))
    groups = [range(start, start + size) for start in microbatches[::size]]
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, stages_per_rank * num_ranks, num_ranks)
        forward = [Action(stage, Kind.F, m) for group in groups for stage in stages for m in group]
        kind = Kind.I if split else Kind.B
        backward = [Action(stage, kind, m) for group in groups for stage in stages[::-1] for m in group]
        weights = [Action(action.stage, Kind.W, action.microbatch) for action in backward if split]
        ahead = (stages_per_rank - 1) * size + lead * (num_ranks - 1 - rank)
        whole = forward[:ahead]
        for turn in range(len(backward) + rank):
            whole += forward[turn + ahead : turn + ahead + 1] + backward[turn : turn + 1]
            whole += weights[max(0, turn - rank) : max(0, turn - rank + 1)]
        rows.append(tuple(action for action in whole if action.microbatch in microbatches))
    return Schedule(request.name, loop(num_ranks, stages_per_rank), tuple(rows), len(microbatches))


def group_size(num_ranks: int, num_microbatches: int) -> int:
    """G, as in torch: B divided into as many equal groups of at least P as possible. Else P, with a smaller last group.

    Example:
        >>> [group_size(4, num_microbatches) for num_microbatches in (3, 4, 7, 8, 9, 10)]
        [3, 4, 7, 4, 4, 5]
    """
    count = max(1, num_microbatches // num_ranks)
    return num_ranks if num_microbatches % count else num_microbatches // count
