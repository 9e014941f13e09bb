"""Comparison: simulates all schedules for the same ranks, micro-batches, depth and costs, and sorts them by time."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.number_checks import MAX_ACTIONS, MAX_TRIED, check_num_actions
from lightning_hanayo.schedule.registry import Request, build, schedule_names, sizes_for
from lightning_hanayo.schedule.schedule import Schedule
from lightning_hanayo.schedule.simulate import Timeline, simulate


@dataclass(frozen=True)
class Candidate:
    """One schedule of a comparison."""

    name: str
    schedule: Schedule
    timeline: Timeline
    within_budget: bool = True
    """whether its activations keep to the budget that was given"""

    @property
    def peak(self) -> float:
        """The most activations on any rank, in M_a."""
        return max(self.timeline.peak_activations)


@dataclass(frozen=True)
class Comparison:
    """The schedules that can be built, the fastest first, and the reasons why others can't."""

    candidates: tuple[Candidate, ...]
    refused: dict[str, str]
    """the reason by name of schedule"""


def compare(
    *,
    num_ranks: int,
    num_microbatches: int,
    num_waves: int = 1,
    costs: CostModel | None = None,
    activation_budget: float | None = None,
    steps: int = 1,
    pairs: bool = False,
    names: Iterable[str] | None = None,
    tables: Mapping[str, Schedule] = MappingProxyType({}),
    tell: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """All registered schedules (or `names`) for these sizes, each with 2W stages per rank (as W waves have) if it can.

    Args:
        num_ranks, num_microbatches, num_waves: P, B and W.
        costs: for the simulation of all, and for those that choose their order by costs. Per-stage costs are those of
            the schedule with the most stages; a schedule with larger stages gets the sum of several of them.
        activation_budget: in M_a; schedules that can keep to it do, the others are marked.
        steps: the number of steps simulated in a row, without a barrier.
        pairs: whether ranks may run two actions at once, as `costs` with `segments` say.
        names: of the schedules to compare; None: all.
        tables: schedules that exist already, of these sizes, by the name to show.
        tell: is called with the name of each schedule before it is built.

    Raises:
        HanayoError: a size or the budget makes no sense for any schedule, or a table has another size.

    Example:
        >>> [one.name for one in compare(num_ranks=4, num_microbatches=8, names=["1f1b", "hanayo"]).candidates]
        ['hanayo', '1f1b']
    """
    costs = costs or CostModel()
    for name, table in tables.items():
        if (table.num_ranks, table.num_microbatches) != (num_ranks, num_microbatches):
            what = f"{name} is a table of {table.num_ranks} ranks and {table.num_microbatches} micro-batches"
            raise HanayoError(f"{what}; give its sizes for a comparison, not {num_ranks} and {num_microbatches}")
    candidates = [_simulated(name, table, costs, activation_budget, steps) for name, table in tables.items()]
    refused: dict[str, str] = {}
    names = tuple(dict.fromkeys(schedule_names() if names is None else names))
    most = MAX_TRIED if len(names) > 1 else MAX_ACTIONS
    for name in names:
        # Sizes that are wrong for all schedules raise here, outside of the `try`
        Request(name, num_ranks, num_microbatches, num_waves, None, costs, activation_budget)
        check_num_actions(num_ranks, num_microbatches, 2 * num_waves, most=most)
        tell(name)
        try:
            sizes: dict[str, Any] = sizes_for(name, num_waves)
            make = partial(build, name, num_ranks=num_ranks, num_microbatches=num_microbatches, pairs=pairs, **sizes)
            schedule = _built(make, costs, activation_budget)
            candidates.append(_simulated(name, schedule, costs, activation_budget, steps))
        except HanayoError as error:
            refused[name] = str(error).partition("\n")[0]
    return Comparison(tuple(sorted(candidates, key=lambda one: (one.timeline.makespan, one.peak, one.name))), refused)


def _built(make: Callable[..., Schedule], costs: CostModel, budget: float | None) -> Schedule:
    """The schedule, within the budget if it can keep to it."""
    own = costs.merged(make().num_stages) if costs.is_per_stage else costs
    try:
        return make(costs=own, activation_budget=budget)
    except HanayoError:
        return make(costs=own)  # raises the same if it wasn't for the budget


def _simulated(name: str, schedule: Schedule, costs: CostModel, budget: float | None, steps: int) -> Candidate:
    timeline = simulate(schedule, costs.merged(schedule.num_stages), steps)
    return Candidate(name, schedule, timeline, budget is None or max(timeline.peak_activations) <= budget)
