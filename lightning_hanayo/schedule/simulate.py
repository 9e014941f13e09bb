"""Simulation: runs a schedule under a cost model and returns its timeline, with figures such as the bubble."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, repeat
from math import inf
from operator import attrgetter

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.number_checks import MAX_ACTIONS, is_size
from lightning_hanayo.schedule.passes.validation import validate
from lightning_hanayo.schedule.search.evaluator import Evaluator
from lightning_hanayo.schedule.table import COMPUTE, Action, Kind, Table, last_gradients


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one pipeline rank, from `start` to `end` in the timeline's unit of time."""

    rank: int
    action: Action
    start: float
    end: float


Curve = tuple[tuple[float, float], ...]
"""A step function: (time, amount from then on), in ascending order of time."""


@dataclass(frozen=True)
class Timeline:
    """Spans and the figures that follow from them. Times have the unit of the spans (T_F, seconds).

    Example:
        >>> timeline = simulate(build("gpipe", num_ranks=4, num_microbatches=4), CostModel())
        >>> timeline.makespan, round(timeline.bubble_ratio, 3), timeline.peak_activations[0]
        (21.0, 0.429, 4.0)
    """

    spans: tuple[Span, ...]
    shares: tuple[float, ...] = ()
    """per stage, the part of M_a that one micro-batch's activations take; empty: all stages of a rank take the same"""
    num_steps: int = 1
    """how many steps `spans` holds, one after another, each with the same number of spans"""

    @classmethod
    def of(cls, schedule: Table, spans: Iterable[Span], num_steps: int = 1) -> "Timeline":
        """The timeline of spans that were measured or simulated for `schedule`."""
        return cls(tuple(spans), tuple(schedule.share_of(stage) for stage in range(schedule.num_stages)), num_steps)

    @cached_property
    def num_ranks(self) -> int:
        """Pipeline ranks that appear."""
        return max((span.rank for span in self.spans), default=-1) + 1

    @cached_property
    def begin(self) -> float:
        """The first start."""
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((span.end for span in self.spans), default=0.0) - self.begin

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computed; time in which it ran two actions counts once."""
        total, until = [0.0] * self.num_ranks, [-inf] * self.num_ranks
        for span in sorted(self.spans, key=attrgetter("start")):
            if span.action.kind in COMPUTE:
                total[span.rank] += max(0.0, span.end - max(span.start, until[span.rank]))
                until[span.rank] = max(until[span.rank], span.end)
        return tuple(total)

    @property
    def bubble_ratio(self) -> float:
        """The part of all ranks' time in which they don't compute: 1 - busy / (P * makespan)."""
        return _idle(self.busy, self.makespan)

    @cached_property
    def steps(self) -> tuple["Timeline", ...]:
        """Each step as a timeline, at its times in this one."""
        size = len(self.spans) // self.num_steps
        starts = range(0, size * self.num_steps, size) if size else range(0)
        return tuple(Timeline(self.spans[start : start + size], self.shares) for start in starts)

    @property
    def step_times(self) -> tuple[float, ...]:
        """The time that each step adds: from the end of the step before (for the first: from the begin) to its own end.

        rank 0   000000 111111 222222          only the first step waits for the whole pipeline to fill;
        rank 1      000000 111111 222222       the others begin while the step before drains
                 |       |      |      |
        """
        ends = [step.begin + step.makespan for step in self.steps]
        return tuple(end - before for before, end in pairwise((self.begin, *ends)))

    @property
    def step_bubbles(self) -> tuple[float, ...]:
        """The bubble ratio of each step, over `step_times`; the last one is closest to that of a long training."""
        return tuple(_idle(step.busy, time) for step, time in zip(self.steps, self.step_times, strict=True))

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The most activations each rank held at once, in M_a: one micro-batch's activations of one rank's whole share.

        An activation lives from the start of its `F` to the end of its `B` or `W`; an `I` doesn't free it.
        """
        return tuple(max(held for _, held in self.activations(rank)) for rank in range(self.num_ranks))

    def activations(self, rank: int) -> Curve:
        """The activations that a rank holds, in M_a, from `begin` on.

        Example:
            >>> simulate(build("1f1b", num_ranks=2, num_microbatches=2)).activations(1)
            ((0.0, 0.0), (1.0, 1.0), (4.0, 1.0), (7.0, 0.0))
        """
        equal = [1 / max(1, [*self.rank_of.values()].count(rank))] * (1 + max(self.rank_of, default=0))
        return self.held(rank, self.shares or equal)

    def held(self, rank: int, sizes: Sequence[float]) -> Curve:
        """The amount that a rank holds if an activation of stage s takes `sizes[s]` of any unit."""
        changes = []
        for span in self._rows[rank]:
            if span.action.kind is Kind.F:
                changes.append((span.start, sizes[span.action.stage]))
            elif span.action.kind in (Kind.B, Kind.W):
                changes.append((span.end, -sizes[span.action.stage]))
        now = 0.0
        curve = [(self.begin, now)]
        for time, size in sorted(changes):  # at equal times, frees come first: they are negative
            now += size
            if time == curve[-1][0]:
                curve.pop()
            curve.append((time, now))
        return tuple((time, round(held, 9)) for time, held in curve)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The pipeline rank of each stage that appears."""
        return {span.action.stage: span.rank for span in self.spans}

    @cached_property
    def _rows(self) -> tuple[tuple[Span, ...], ...]:
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return tuple(map(tuple, rows))


def _idle(busy: tuple[float, ...], time: float) -> float:
    whole = len(busy) * time
    return 1 - sum(busy) / whole if whole else 0.0


def simulate(schedule: Table, costs: CostModel | None = None, steps: int = 1) -> Timeline:
    """When each action of `schedule` runs: as soon as its rank is free and its inputs have arrived.

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
        most = max(1, MAX_ACTIONS // num_actions)
        raise HanayoError(f"simulate: {steps} steps of {num_actions:,} actions; {most:,} steps of them would do")
    rank_of, microbatches = dict(enumerate(schedule.stage_ranks)), range(schedule.num_microbatches)
    for rank, row in enumerate(schedule.actions):
        for one in row:  # the evaluator's codes need a known stage, kind and micro-batch, on its stage's rank
            if rank_of.get(one.stage) != rank or one.kind not in COMPUTE or one.microbatch not in microbatches:
                validate(schedule)  # raises, with the reason
    costs = costs or CostModel()
    evaluator = Evaluator(schedule, costs)
    rows = evaluator.encode(schedule.actions)
    lasts = last_gradients(schedule)
    reductions = {
        stage: takes for stage in lasts if (takes := costs.of(schedule, Action(stage, Kind.REDUCE_GRAD, None)))
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
        free = [0.0] * schedule.num_ranks
        # reductions start when they are ready, one at a time per rank
        for ready, stage in sorted((times.ends[rank_of[stage]][lasts[stage]], stage) for stage in reductions):
            rank = rank_of[stage]
            start = max(ready, free[rank])
            free[rank] = start + reductions[stage]
            spans.append(Span(rank, Action(stage, Kind.REDUCE_GRAD, None), start, free[rank]))
            begin[rank] = max(begin[rank], free[rank])
    return Timeline.of(schedule, spans, steps)
