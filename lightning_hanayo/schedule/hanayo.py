"""hanayo: waves with the backward in one piece (SC'23, doi 10.1145/3581784.3607073).

The 4W legs are numbered forward 0..2W-1, backward 2W..4W-1; even legs run down the ranks, odd ones up.

    P = 4, W = 1     rank 1   F0 F1 F2 F0 F3 F1 B0 F2 B1 F3 B2 B0 B3 B1 B2 B3
                     leg      0  0  0  1  0  1  2  1  2  1  2  3  2  3  3  3
"""

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.placement import zigzag
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.table import Schedule


@register_schedule("hanayo")
def hanayo(request: Request) -> Schedule:
    """The paper's order at B = P."""
    request.stages_per_rank(2 * request.num_waves, default=2 * request.num_waves)
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    rows = tuple(_row(rank, num_ranks, request.num_waves, num_microbatches) for rank in range(num_ranks))
    return Schedule(request.name, zigzag(num_ranks, request.num_waves), rows, num_microbatches)


def _row(rank: int, num_ranks: int, num_waves: int, num_microbatches: int) -> tuple[Action, ...]:
    """The paper's order for groups of P micro-batches one after another, without those beyond the last."""
    legs = [_leg(leg, rank, num_ranks, num_waves) for leg in range(4 * num_waves)]
    order = _order(rank, num_ranks, len(legs))
    starts = range(0, num_microbatches, num_ranks)
    return tuple(
        Action(*legs[leg], start + item) for start in starts for leg, item in order if start + item < num_microbatches
    )


def _leg(leg: int, rank: int, num_ranks: int, num_waves: int) -> tuple[int, Kind]:
    place = rank if leg % 2 == 0 else num_ranks - 1 - rank
    if leg < 2 * num_waves:
        return leg * num_ranks + place, Kind.F
    return 4 * num_waves * num_ranks - 1 - (leg * num_ranks + place), Kind.B


def _order(rank: int, num_ranks: int, num_legs: int) -> list[tuple[int, int]]:
    """(leg, micro-batch) for one group of P: `lead` items of a leg, then it takes turns with the next leg."""
    order: list[tuple[int, int]] = []
    begun = 0
    for leg in range(num_legs):
        lead = num_ranks - rank if leg % 2 == 0 else rank + 1
        order += [(leg, item) for item in range(begun, lead)]
        begun = 0
        for item in range(lead, num_ranks):
            if leg + 1 < num_legs:
                order.append((leg + 1, begun))
                begun += 1
            order.append((leg, item))
    return order
