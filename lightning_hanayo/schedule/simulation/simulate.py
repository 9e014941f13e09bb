"""Simulation: runs a schedule under a cost model and returns its timeline."""

from collections.abc import Iterator, Mapping
from itertools import repeat

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import COMPUTE, Action, Kind
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.dependency import last_gradients
from lightning_hanayo.schedule.number_checks import MAX_ACTIONS, is_size
from lightning_hanayo.schedule.passes.validation import validate
from lightning_hanayo.schedule.search.evaluator import ActionTimes, Evaluator
from lightning_hanayo.schedule.simulation.timeline import Span, Timeline
from lightning_hanayo.schedule.table import Table


def simulate(schedule: Table, costs: CostModel | None = None, steps: int = 1) -> Timeline:
    """When each action of `schedule` runs: as soon as its rank is free and what it waits for has arrived.

    A message takes `costs.hop` from its sender's end to its receiver's earliest start. It delays nothing else: the
    sender goes on at once, any number of messages travel at the same time, receives are posted early enough, and a hop
    within a rank costs nothing. Under these rules the closed forms of Hanayo, GPipe, 1F1B and interleaved 1F1B hold
    exactly for T_B >= T_F (tests/schedule/builders).

    If it has a cost, a stage's gradient reduction starts after its last weight gradient and overlaps with compute. A
    rank runs one reduction at a time.

    With `steps` > 1 there is no barrier between steps: a rank starts the next step as soon as its own actions of the
    last one are done, its reductions included. `Timeline.step_times` has the time that each step adds.

    Raises:
        HanayoError: the schedule isn't valid, a tuple in `costs` has the wrong length, or `steps` is no whole number of
            at least 1.
    """
    if not is_size(steps):
        raise HanayoError(f"simulate: steps={steps!r}, expected at least 1, a whole number")
    num_actions = sum(map(len, schedule.actions))
    if steps * num_actions > MAX_ACTIONS:
        raise HanayoError(
            f"simulate: {steps} steps of {num_actions:,} actions are more than {MAX_ACTIONS:,} actions; "
            f"{max(1, MAX_ACTIONS // num_actions):,} steps would do"
        )
    if not _can_be_encoded(schedule):
        validate(schedule)
    costs = costs or CostModel()
    evaluator = Evaluator(schedule, costs)
    rows = evaluator.encode(schedule.actions)
    reductions = {
        stage: takes
        for stage in last_gradients(schedule)
        if (takes := costs.of(schedule, Action(stage, Kind.REDUCE_GRAD, None)))
    }
    begin = [0.0] * schedule.num_ranks
    spans: list[Span] = []
    for _ in range(steps):
        times = evaluator.run(rows, begin)
        if times is None:
            validate(schedule)  # raises, with the reason
        assert times is not None
        for rank, timed in enumerate(zip(schedule.actions, times.starts, times.ends, strict=True)):
            spans.extend(map(Span, repeat(rank), *timed))
        begin = times.last
        for span in _reductions_after(times, schedule, reductions):
            spans.append(span)
            begin[span.rank] = max(begin[span.rank], span.end)
    return Timeline.of(schedule, spans, steps)


def _can_be_encoded(schedule: Table) -> bool:
    """Whether every action has a known stage, kind and micro-batch, and is on its stage's rank."""
    rank_of, microbatches = dict(enumerate(schedule.stage_ranks)), range(schedule.num_microbatches)
    return all(
        rank_of.get(action.stage) == rank and action.kind in COMPUTE and action.microbatch in microbatches
        for rank, row in enumerate(schedule.actions)
        for action in row
    )


def _reductions_after(times: ActionTimes, schedule: Table, takes: Mapping[int, float]) -> Iterator[Span]:
    """The reductions of a step whose compute ran at `times`: by the time they are ready, one at a time per rank."""
    free, rank_of = [0.0] * schedule.num_ranks, schedule.stage_ranks
    lasts = last_gradients(schedule)
    ready = [(times.ends[rank_of[stage]][lasts[stage]], stage) for stage in takes]
    for time, stage in sorted(ready):
        rank = rank_of[stage]
        start = max(time, free[rank])
        free[rank] = start + takes[stage]
        yield Span(rank, Action(stage, Kind.REDUCE_GRAD, None), start, free[rank])
