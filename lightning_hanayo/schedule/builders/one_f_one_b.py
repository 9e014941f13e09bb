"""1f1b: one forward and one backward in turn, after a warm-up (DAPPLE, PipeDream-flush).

P = 3     rank 0   F0 F1 F2 .  .     .     B0    F3 B1    ...      warm-up of P - rank forwards
          rank 1      F0 F1 .     B0    F2 B1    F3 B2    ...
          rank 2         F0 B0    F1 B1    F2 B2    F3 B3
"""

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.placement import loop
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule


@register_schedule("1f1b")
def one_f_one_b(request: Request) -> Schedule:
    """One stage per rank; activations of at most P - rank M_a."""
    request.stages_per_rank(1)
    num_ranks, microbatches = request.num_ranks, range(request.num_microbatches)
    rows = []
    for rank in range(num_ranks):
        forward, backward = ([Action(rank, kind, m) for m in microbatches] for kind in (Kind.F, Kind.B))
        rows.append(tuple(alternate(forward, backward, num_ranks - rank)))
    return Schedule(request.name, loop(num_ranks), tuple(rows), len(microbatches))


def alternate(forward: list[Action], backward: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then backward and forward in turn until both are through."""
    row = forward[:warm_up]
    for position, action in enumerate(backward, warm_up):
        row += [action, *forward[position : position + 1]]
    return row
