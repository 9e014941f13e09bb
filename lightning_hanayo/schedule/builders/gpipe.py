"""gpipe: all forwards, then all backwards (GPipe, arXiv 1811.06965).

rank 0   F0 F1 F2 F3 .  .  .  .     .     .     B0    B1    B2    B3
rank 1      F0 F1 F2 F3 .  .     .        B0    B1    B2    B3
"""

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.placement import loop
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule


@register_schedule("gpipe")
def gpipe(request: Request) -> Schedule:
    """One stage per rank; activations grow to B M_a."""
    request.stages_per_rank(1)
    microbatches = range(request.num_microbatches)
    rows = tuple(
        tuple(Action(rank, kind, m) for kind in (Kind.F, Kind.B) for m in microbatches)
        for rank in range(request.num_ranks)
    )
    return Schedule(request.name, loop(request.num_ranks), rows, request.num_microbatches)
