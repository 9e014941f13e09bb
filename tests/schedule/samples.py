"""Schedules for tests: every family, drawn by hypothesis or listed."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Action, CostModel, Kind, Schedule, build, validate, with_loss_stage
from lightning_hanayo.schedule.cost import Segment
from lightning_hanayo.schedule.passes.pairing import pair_up

unhurried = settings(deadline=None, max_examples=5)
"""for every property test: no deadline, as the machine may be busy; each run of the tests draws other examples"""

NAMES = ("gpipe", "1f1b", "zb-h1", "interleaved", "interleaved-zb", "zbv", "v-half", "v-min", "hanayo", "hanayo-zb")


def row(text: str) -> tuple[Action, ...]:
    """A row of a table as a test writes it: `row("0F0 0B0")`."""
    return tuple(Action.parse(cell) for cell in text.split())


def table(*rows: str, stage_ranks: tuple[int, ...], num_microbatches: int) -> Schedule:
    return Schedule("by hand", stage_ranks, tuple(map(row, rows)), num_microbatches)


def make(name: str, num_ranks: int, num_microbatches: int, depth: int = 1) -> Schedule:
    """`depth` waves, or stages per rank, where the schedule has a choice. Searches are kept short."""
    if name == "dualpipev":  # which needs as many micro-batches as stages
        return build(name, num_ranks=num_ranks, num_microbatches=max(num_microbatches, 2 * num_ranks))
    if name in ("hanayo", "hanayo-zb"):
        with patch("lightning_hanayo.schedule.search.search.EFFORT", 2_000):
            return build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_waves=depth)
    if name in ("interleaved", "interleaved-zb"):
        return build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_stages_per_rank=depth)
    return build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)


def split(schedule: Schedule) -> Schedule:
    """Each whole backward cut in two, W right after I; every third W waits until its rank's end. There are no pairs."""

    def rewritten(row: tuple[Action, ...]) -> tuple[Action, ...]:
        done: list[Action] = []
        late: list[Action] = []
        for action in row:
            if action.kind is not Kind.B:
                done.append(action)
                continue
            done.append(replace(action, kind=Kind.I))
            (late if len(done) % 3 == 0 else done).append(replace(action, kind=Kind.W))
        return (*done, *late)

    return replace(
        schedule, name=f"{schedule.name}, split", actions=tuple(map(rewritten, schedule.actions)), pairs=frozenset()
    )


LINK = tuple((kind, (Segment(start=1.0), Segment(wait=0), Segment(1.0, start=1.0), Segment(wait=1))) for kind in "FBI")
"""actions that wait for their link for half of their time"""


def paired(schedule: Schedule) -> Schedule:
    """In pairs where that makes the step shorter. The search is kept short."""
    with patch("lightning_hanayo.schedule.passes.pairing.EFFORT", 5_000):
        return pair_up(schedule, CostModel(segments=LINK))


@st.composite
def in_some_pairs(draw: st.DrawFn, schedule: Schedule, *, valid: bool = True) -> Schedule:
    """The same with some neighbours in pairs; if `valid`, only those with which it can run."""
    neighbours = [(rank, both) for rank, row in enumerate(schedule.actions) for both in pairwise(row)]
    fitting = [(rank, both) for rank, both in neighbours if _may_run_at_once(*both)]
    chosen = st.lists(st.sampled_from(fitting), max_size=12, unique=True) if fitting else st.just([])
    for rank, both in draw(chosen):
        more = _with_pair(schedule, rank, both)
        if not {action for pair in schedule.pairs for action in pair} & set(both) and (not valid or _can_run(more)):
            schedule = more
    return schedule


def _may_run_at_once(first: Action, second: Action) -> bool:
    return first.microbatch != second.microbatch and Kind.W not in (first.kind, second.kind)


def _with_pair(schedule: Schedule, rank: int, both: tuple[Action, Action]) -> Schedule:
    """The same with one more pair of neighbours, in the order of a pair."""
    first, second = sorted(both, key=lambda action: (Kind.F, Kind.B, Kind.I).index(action.kind))
    rows, at = list(schedule.actions), schedule.actions[rank].index(both[0])
    rows[rank] = (*rows[rank][:at], first, second, *rows[rank][at + 2 :])
    return replace(schedule, actions=tuple(rows), pairs=schedule.pairs | {(first, second)})


def _can_run(schedule: Schedule) -> bool:
    try:
        validate(schedule)
    except HanayoError:
        return False
    return True


@st.composite
def schedules(draw: st.DrawFn, max_ranks: int = 5, max_microbatches: int = 8, *, pairs: bool = True) -> Schedule:
    """Any schedule, with or without its loss stage, its backward whole or split, with or without `pairs`."""
    name = draw(st.sampled_from(NAMES))
    num_ranks, num_microbatches = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_microbatches))
    schedule = make(name, num_ranks, num_microbatches, draw(st.integers(1, 3)))
    if draw(st.booleans()):
        schedule = with_loss_stage(schedule)
    schedule = split(schedule) if draw(st.booleans()) else schedule
    if not pairs or draw(st.booleans()):
        return schedule
    if draw(st.booleans()):
        return draw(in_some_pairs(schedule))
    return paired(schedule)
