"""v-min: a V in a third of 1f1b's activations (arXiv 2405.15362, section 3).

A micro-batch takes one cell per rank, all the way there and back (see `building_block`):

    P = 4     cell     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
              rank 0   F0                   F1       I1                   I0
              rank 1      F0             F1             I1             I0
              rank 2         F0       F1                   I1       I0
              rank 3            F0 F1                         I1 I0

F0 .. I0 and F1 .. I1 together last about 4P cells on every rank, so it holds 4P/6 stages. The way back begins 2 cells
later where 3 divides P-1, else 3: of the pauses of 0 to 3 cells those that idle least once the block is drawn together.

The peak is min(B, (P+4) // 3) M_a, as the authors print. With F = I = W = 1 and B >= P the idle time (makespan - 3B) is
2P - 5/2, less 1 where 3 divides P, less 2 where it divides P+1 (P = 1: none, P = 2: 1/2). They print about 2P; their
program idles as long, and 2 longer where 3 divides P+1. From P = 4 on unequal costs slow every period, as they say too.
"""

from lightning_hanayo.schedule.builders.building_block import Cells, repeat
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.table import Schedule


@register_schedule("v-min", depth="two")
def v_min(request: Request) -> Schedule:
    """Two stages per rank, at most (P+4) // 3 M_a."""
    request.refuse_waves()
    request.stages_per_rank(2, default=2)
    num_ranks = request.num_ranks
    block = [_cells(rank, num_ranks) for rank in range(num_ranks)]
    return repeat(request, block, (num_ranks + 4) // 3, eager=True)


def _cells(rank: int, num_ranks: int) -> Cells:
    way = 2 * num_ranks
    back = way + (2 if num_ranks % 3 == 1 else 3)
    return rank, way - 1 - rank, back + rank, back + way - 1 - rank
