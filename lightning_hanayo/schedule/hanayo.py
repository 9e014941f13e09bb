"""hanayo: waves with the backward in one piece (SC'23, doi 10.1145/3581784.3607073), extended to any B.

B = P is the paper's order, op for op. Its 4W legs are numbered forward 0..2W-1, backward 2W..4W-1; even legs run down the
ranks, odd ones up:

    P = 4, W = 1     rank 1   F0 F1 F2 F0 F3 F1 B0 F2 B1 F3 B2 B0 B3 B1 B2 B3
                     leg      0  0  0  1  0  1  2  1  2  1  2  3  2  3  3  3

Other B are ours. Micro-batches form groups of P; the paper's start times, each group later by the time a rank works for
one group, say how soon an action should run:

    group 0   /\\/\\/\\      soon = start in the paper's order + group * P (T_F + T_B)
    group 1       /\\/\\/\\

and a list scheduler inside the activation budget follows them. The tail of one group then fills the head of the next: at
T_C = 0 the makespan is B (T_F + T_B) + (P-1) max(T_F, T_B) / W for every multiple of P, so the idle time stays what the
paper's single group has.
"""

from collections.abc import Iterator

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.list_scheduler import Key, list_schedule
from lightning_hanayo.schedule.placement import zigzag
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.simulation import simulate
from lightning_hanayo.schedule.table import Schedule


@register_schedule("hanayo")
def hanayo(request: Request) -> Schedule:
    """The paper's order at B = P; elsewhere the best of a few candidates under the costs, within the budget (default P)."""
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
    best, makespan = (paper, played.makespan) if fits else (None, 0.0)
    for candidate, time in _candidates(paper, costs, budget, request):
        if best is None or time < makespan * (1 - 1e-9):
            best, makespan = candidate, time
    assert best is not None
    return best


def _candidates(
    table: Schedule, costs: CostModel, budget: float, request: Request
) -> Iterator[tuple[Schedule, float]]:
    soon = _paper_times(request.num_ranks, request.num_waves, costs)
    for kinds in ((Kind.F, Kind.B), (Kind.B, Kind.F)):
        yield list_schedule(table, costs, budget, kinds, soon)


def _paper_times(num_ranks: int, num_waves: int, costs: CostModel) -> Key:
    """When an action would start were the paper's groups shifted against each other by one rank's work for a group."""
    timeline = simulate(paper_order("group", num_ranks, num_waves, num_ranks), costs)
    work = max(timeline.busy)
    unit = 1e-6 * work or 1.0
    start = {(span.action.stage, span.action.kind, span.action.microbatch): span.start for span in timeline.spans}

    def soon(stage: int, kind: Kind, microbatch: int) -> float:
        group, item = divmod(microbatch, num_ranks)
        return round((start[stage, kind, item] + group * work) / unit)

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
