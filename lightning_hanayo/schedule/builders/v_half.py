"""v-half: a V in half of 1f1b's activations (arXiv 2405.15362, section 3).

A micro-batch takes two cells per rank down and one up, forward and backward alike (see `building_block`):

    P = 3     cell     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16
              rank 0   F0                   F1 I1                      I0
              rank 1         F0          F1          I1             I0
              rank 2               F0 F1                   I1    I0

The longer F0 .. I0, the shorter F1 .. I1: every rank holds about P/2. For even P the way back begins three cells later,
else F1 and I0 would fall together.

The peak is min(B, (P+2) // 2) M_a, as the authors print. With F = I = W = 1 and B >= P the idle time (makespan - 3B) is
3P/2 - 2 for odd P (P = 1: none), 3P/2 - 7/2 for even P (P = 2: 1/2). They print about 3P/2; so does their program idle.
Other costs leave the steady state without a gap as long as T_W + 2 T_I >= 2 T_F and T_W + 2 T_F >= 2 T_I, as they say.
"""

from lightning_hanayo.schedule.builders.building_block import Cells, repeat
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.table import Schedule


@register_schedule("v-half", depth="two")
def v_half(request: Request) -> Schedule:
    """Two stages per rank, at most (P+2) // 2 M_a."""
    request.refuse_waves()
    request.stages_per_rank(2, default=2)
    num_ranks = request.num_ranks
    block = [_cells(rank, num_ranks) for rank in range(num_ranks)]
    return repeat(request, block, (num_ranks + 2) // 2, eager=False)


def _cells(rank: int, num_ranks: int) -> Cells:
    way = 3 * num_ranks
    back = way + (3 if num_ranks % 2 == 0 else 0)
    return 2 * rank, way - 2 - rank, back - 1 + 2 * rank, back + way - 2 - rank
