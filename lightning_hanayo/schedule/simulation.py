"""Simulation: a schedule under a cost model, as a timeline."""

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.dependency import play, waits_in
from lightning_hanayo.schedule.table import Schedule
from lightning_hanayo.schedule.timeline import Span, Timeline
from lightning_hanayo.schedule.validation import validate


def simulate(schedule: Schedule, costs: CostModel | None = None, steps: int = 1) -> Timeline:
    """When each action of `schedule` runs: as early as its rank is free and what it waits for has arrived.

    A message takes `costs.message` from its sender's end to its receiver's earliest start and holds up nobody else: the
    sender goes on at once, any number of messages travel at the same time, and a hop within a rank costs nothing. (With
    this meaning the closed forms of Hanayo, GPipe, 1F1B and interleaved 1F1B hold exactly, see docs/design/facts.md.)

    With a cost for it, a stage's gradient reduction starts after its last weight gradient, one at a time per rank,
    beside the compute. With `steps` > 1 a rank starts the next step as soon as its own actions of the last are done,
    its reductions included.

    Raises:
        HanayoError: the schedule isn't valid, or a tuple in `costs` has the wrong length.
    """
    costs = costs or CostModel()
    waits = waits_in(schedule.actions, schedule.num_stages, schedule.num_microbatches)
    order = list(play(schedule.actions, waits))
    if len(order) != sum(map(len, schedule.actions)):
        validate(schedule)
    takes = {(a.stage, a.kind): costs.of(schedule, a) for a in order}
    free = [0.0] * schedule.num_ranks
    spans: list[Span] = []
    for _ in range(steps):
        step = _step(schedule, costs, order, waits, takes, free)
        reductions = _reductions(schedule, costs, step)
        for span in (*step, *reductions):
            free[span.rank] = max(free[span.rank], span.end)
        spans += [*step, *reductions]
    return Timeline.of(schedule, spans)


def _step(
    schedule: Schedule,
    costs: CostModel,
    order: list[Action],
    waits: dict[Action, tuple[Action, ...]],
    takes: dict[tuple[int, Kind], float],
    begin: list[float],
) -> list[Span]:
    rank_of = schedule.stage_ranks
    free = list(begin)
    ends: dict[Action, float] = {}
    spans = []
    for action in order:
        rank = rank_of[action.stage]
        start = free[rank]
        for other in waits[action]:
            arrival = ends[other]
            if rank_of[other.stage] != rank:
                arrival += costs.hop(schedule, min(other.stage, action.stage))
            start = max(start, arrival)
        free[rank] = ends[action] = start + takes[action.stage, action.kind]
        spans.append(Span(rank, action, start, free[rank]))
    return spans


def _reductions(schedule: Schedule, costs: CostModel, step: list[Span]) -> list[Span]:
    last = {span.action.stage: span for span in step if span.action.kind in (Kind.B, Kind.W)}
    lane = [0.0] * schedule.num_ranks
    spans = []
    for stage, span in sorted(last.items(), key=lambda item: item[1].end):
        action = Action(stage, Kind.REDUCE_GRAD, None)
        takes = costs.of(schedule, action)
        if takes > 0:
            start = max(span.end, lane[span.rank])
            lane[span.rank] = start + takes
            spans.append(Span(span.rank, action, start, lane[span.rank]))
    return spans
