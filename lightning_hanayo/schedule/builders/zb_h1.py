"""zb-h1: 1f1b with the backward split, in the same memory as 1f1b (arXiv 2401.10241, section 2.1).

Rank d runs P-1-d forwards ahead, as 1f1b does, and delays up to d weight gradients, so each rank holds P micro-batches.
The later ranks send input gradients without a pause, and run their delayed weight gradients when 1f1b would idle:

    P = 3     rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 ...
              rank 1      F0 F1 .  I0 F2 I1 W0 F3 I2 W1 ...
              rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 ...

For B >= P the makespan is B (T_F + T_I + T_W) + (P-1) max(T_F, T_I, T_F + T_I - T_W); the paper prints the last of the
three, and it is the largest where T_W is at most T_F and T_I. With F = I = W that is a third of 1f1b's idle time. For
fewer micro-batches it is 2B + 2P - 1, at F = I = W = 1. The peak is min(B, P) M_a.
"""

from lightning_hanayo.schedule.builders.interleaved import split_loop
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule


@register_schedule("zb-h1")
def zb_h1(request: Request) -> Schedule:
    """One stage per rank."""
    return split_loop(request, request.stages_per_rank(1))
