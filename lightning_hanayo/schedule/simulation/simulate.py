"""Simulation: runs a schedule under a cost model and returns its timeline."""

from collections.abc import Iterator
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
    rank runs one reduction at a time. A stage and its twin reduce together, when both are ready and both ranks free.

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
    reductions = _Reductions(schedule, costs)
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
        for span in reductions.after(times):
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


class _Reductions:
    """The gradient reductions of a step, each of one stage, or of a stage and its twin on two ranks at once."""

    def __init__(self, schedule: Table, costs: CostModel) -> None:
        self._rank_of = schedule.stage_ranks
        self._lasts = last_gradients(schedule)
        twins = schedule.replica_of or range(schedule.num_stages)
        self._groups: list[tuple[tuple[int, ...], float]] = []
        for stages in (tuple({stage, twin}) for stage, twin in enumerate(twins) if stage <= twin):
            takes = max(costs.of(schedule, Action(stage, Kind.REDUCE_GRAD, None)) for stage in stages)
            if takes > 0 and not self._lasts.keys().isdisjoint(stages):
                self._groups.append((stages, takes))

    def after(self, times: ActionTimes) -> Iterator[Span]:
        """The reductions of a step whose compute ran at `times`: by the time they are ready, one at a time per rank."""
        free = [0.0] * len(times.last)
        ends = {stage: times.ends[self._rank_of[stage]][position] for stage, position in self._lasts.items()}
        ready = [(max(ends[one] for one in stages if one in ends), stages, takes) for stages, takes in self._groups]
        for time, stages, takes in sorted(ready):
            start = max([time, *(free[self._rank_of[stage]] for stage in stages)])
            for stage in stages:
                rank = self._rank_of[stage]
                free[rank] = start + takes
                yield Span(rank, Action(stage, Kind.REDUCE_GRAD, None), start, free[rank])
