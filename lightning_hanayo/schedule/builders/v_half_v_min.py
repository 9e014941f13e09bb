"""v-half and v-min: V schedules in a half and in a third of 1f1b's activations (arXiv 2405.15362, section 3).

A rank holds two stages, one on the way down and one on the way up. `building_block` repeats the cells of one
micro-batch. In v-half a micro-batch takes two cells per rank down and one up, forward and backward alike:

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
"""

from lightning_hanayo.schedule.builders.building_block import repeat
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule


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
