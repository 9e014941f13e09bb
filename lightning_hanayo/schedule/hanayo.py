"""hanayo: waves with the backward in one piece (SC'23, doi 10.1145/3581784.3607073), extended to any B.

B = P is the paper's order, op for op. Its 4W legs are numbered forward 0..2W-1, backward 2W..4W-1; even legs run down
the ranks, odd ones up:

    P = 4, W = 1     rank 1   F0 F1 F2 F0 F3 F1 B0 F2 B1 F3 B2 B0 B3 B1 B2 B3
                     leg      0  0  0  1  0  1  2  1  2  1  2  3  2  3  3  3

Other B are ours. Micro-batches form groups of P; the paper's start times, each group later by the time a rank works for
one group, say how soon an action should run, and a list scheduler inside the activation budget follows them:

    group 0   v v v         soon = start in the paper's order + group * P (T_F + T_B)
    group 1         v v v

The tail of one group then fills the head of the next. At T_C = 0 the makespan is B (T_F + T_B) + (P-1) max(T_F, T_B)/W
for every multiple of P: the idle time stays what the paper's single group has.
"""

from collections.abc import Iterator
from itertools import accumulate
from math import inf

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.list_scheduler import Key, list_schedule
from lightning_hanayo.schedule.placement import zigzag
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.simulation import simulate
from lightning_hanayo.schedule.table import Schedule

CLOSE = 1.005
"""An order within half a percent of the one that idles no longer than the paper's single group ends the search."""


@register_schedule("hanayo", depth="waves")
def hanayo(request: Request) -> Schedule:
    """The paper's order at B = P, elsewhere the best of a few candidates; always within the budget (default P)."""
    request.stages_per_rank(2 * request.num_waves, default=2 * request.num_waves)
    budget = request.num_ranks if request.activation_budget is None else request.activation_budget
    if budget < 1:
        raise HanayoError(
            f"schedule {request.name!r}: activation_budget={budget:g}, expected at least 1 (in M_a: one micro-batch's "
            "activations of a rank's whole share, which a wave holds before its first backward)"
        )
    costs = request.costs or CostModel()
    paper = paper_order(request.name, request.num_ranks, request.num_waves, request.num_microbatches)
    played = simulate(paper, costs)
    fits = max(played.peak_activations) <= budget + 1e-9
    if fits and request.num_microbatches == request.num_ranks:
        return paper
    best, makespan = (paper, played.makespan) if fits else (None, inf)
    enough = CLOSE * (_paper_idle(request, costs) + max(played.busy))
    rooms = dict.fromkeys((min(budget, request.num_ranks), budget))  # more than P only if P isn't enough
    for candidate in (found for room in rooms for found in _candidates(paper, costs, room, request)):
        time = simulate(candidate, costs).makespan
        if time < makespan * (1 - 1e-9):
            best, makespan = candidate, time
        if makespan <= enough:
            break
    assert best is not None
    return best


def _paper_idle(request: Request, costs: CostModel) -> float:
    """How long the busiest rank idles in one group of P."""
    group = simulate(paper_order("group", request.num_ranks, request.num_waves, request.num_ranks), costs)
    return group.makespan - max(group.busy)


def _candidates(table: Schedule, costs: CostModel, budget: float, request: Request) -> Iterator[Schedule]:
    """Orders, to be judged under `costs`. Those made for even stages and free hops are tight and often bear the real
    costs best: a list scheduler that sees uneven arrivals takes what is there and loses the beat.
    """
    even = _even(costs, request.num_ranks)
    groupings = _groupings(request.num_microbatches, request.num_ranks)
    for sizes in groupings:
        soon = _soon(request.num_ranks, request.num_waves, even, sizes)
        yield list_schedule(table, even, budget, (Kind.F, Kind.B), soon)
    soon = _soon(request.num_ranks, request.num_waves, even, groupings[0])
    yield list_schedule(table, even, budget, (Kind.B, Kind.F), soon)
    if costs != even:
        soon = _soon(request.num_ranks, request.num_waves, costs, groupings[0])
        yield list_schedule(table, costs, budget, (Kind.F, Kind.B), soon)


def _even(costs: CostModel, num_ranks: int) -> CostModel:
    """The same work, spread evenly over the stages, and free messages."""
    parts = (costs.forward, costs.backward_input, costs.backward_weight)
    forward, backward_input, backward_weight = (
        sum(part) / num_ranks if isinstance(part, tuple) else part for part in parts
    )
    return CostModel(forward, backward_input, backward_weight)


def _groupings(num_microbatches: int, num_ranks: int) -> list[tuple[int, ...]]:
    """Ways to cut 0..B-1 into groups of at most P: the last one smaller, the first one, all even, and each alone."""
    full, rest = divmod(num_microbatches, num_ranks)
    small = (rest,) if rest else ()
    count = full + len(small)
    even = tuple(num_microbatches // count + (group < num_microbatches % count) for group in range(count))
    ways = [(num_ranks,) * full + small, small + (num_ranks,) * full, even, (1,) * num_microbatches]
    return list(dict.fromkeys(ways))


def _soon(num_ranks: int, num_waves: int, costs: CostModel, sizes: tuple[int, ...]) -> Key:
    """When an action would start if each group ran the paper's order, later by a rank's work for those before it."""
    used = {*sizes, num_ranks}
    timelines = {size: simulate(paper_order("group", num_ranks, num_waves, size), costs) for size in used}
    work = max(timelines[num_ranks].busy) / num_ranks
    tick = 1e-6 * work or 1.0
    starts = {
        size: {(span.action.stage, span.action.kind, span.action.microbatch): span.start for span in timeline.spans}
        for size, timeline in timelines.items()
    }
    begins = accumulate(sizes, initial=0)
    places = [(begin, starts[size], item) for begin, size in zip(begins, sizes, strict=False) for item in range(size)]

    def soon(stage: int, kind: Kind, microbatch: int) -> float:
        begin, start, item = places[microbatch]
        return round((start[stage, kind, item] + begin * work) / tick)

    return soon


def paper_order(name: str, num_ranks: int, num_waves: int, num_microbatches: int) -> Schedule:
    """The paper's order for groups of P one after another, without the micro-batches beyond the last."""
    rows = tuple(_row(rank, num_ranks, num_waves, num_microbatches) for rank in range(num_ranks))
    return Schedule(name, zigzag(num_ranks, num_waves), rows, num_microbatches)


def _row(rank: int, num_ranks: int, num_waves: int, num_microbatches: int) -> tuple[Action, ...]:
    legs = [_leg(leg, rank, num_ranks, num_waves) for leg in range(4 * num_waves)]
    order = _order(rank, num_ranks, len(legs))
    starts = range(0, num_microbatches, num_ranks)
    return tuple(
        Action(*legs[leg], start + item) for start in starts for leg, item in order if start + item < num_microbatches
    )


def _leg(leg: int, rank: int, num_ranks: int, num_waves: int) -> tuple[int, Kind]:
    """The stage and kind of a leg on a rank."""
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
