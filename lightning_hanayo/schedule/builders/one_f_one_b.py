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
    request.refuse_waves()
    request.stages_per_rank(1, default=1)
    rows = tuple(_row(rank, request.num_ranks, request.num_microbatches) for rank in range(request.num_ranks))
    return Schedule(request.name, loop(request.num_ranks), rows, request.num_microbatches)


def _row(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    forward = [Action(rank, Kind.F, m) for m in range(num_microbatches)]
    backward = [Action(rank, Kind.B, m) for m in range(num_microbatches)]
    return alternate(forward, backward, num_ranks - rank)


def alternate(forward: list[Action], backward: list[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then backward and forward in turn until both are through."""
    row = forward[:warm_up]
    rest = forward[warm_up:]
    for position, action in enumerate(backward):
        row.append(action)
        row.extend(rest[position : position + 1])
    return tuple(row)
