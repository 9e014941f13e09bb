"""Comparison: every schedule that can be had for the same ranks, micro-batches, depth and costs, the fastest first."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.build import build
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.registry import Request, schedule_names, sizes_for
from lightning_hanayo.schedule.simulation.simulate import simulate
from lightning_hanayo.schedule.simulation.timeline import Timeline
from lightning_hanayo.schedule.table import Schedule


@dataclass(frozen=True)
class Candidate:
    """One schedule that takes part."""

    name: str
    schedule: Schedule
    timeline: Timeline
    inside: bool = True
    """whether its activations stay inside the budget that was given"""

    @property
    def peak(self) -> float:
        """The most activations on any rank, in M_a."""
        return max(self.timeline.peak_activations)


@dataclass(frozen=True)
class Comparison:
    """Who takes part, the fastest first, and why the others can't."""

    candidates: tuple[Candidate, ...]
    refused: dict[str, str]
    """the reasons by name"""


def compare(
    *,
    num_ranks: int,
    num_microbatches: int,
    num_waves: int = 1,
    costs: CostModel | None = None,
    activation_budget: float | None = None,
    steps: int = 1,
    names: Iterable[str] | None = None,
) -> Comparison:
    """All registered schedules (or `names`) for these sizes, each with the 2W stages per rank of W waves if it can.

    Args:
        num_ranks: P.
        num_microbatches: B.
        num_waves: W.
        costs: what all are simulated with, and those that choose their order optimize for. Per-stage costs are the
            finest schedule's; one whose stages hold several of these in a row takes their sum.
        activation_budget: in M_a; schedules that can keep one do, the others are marked.
        steps: simulated back to back, without a barrier.
        names: of the schedules to look at, each once; None: all.

    Raises:
        HanayoError: a size or the budget makes no sense for any schedule.

    Example:
        >>> [one.name for one in compare(num_ranks=4, num_microbatches=8, names=["1f1b", "hanayo"]).candidates]
        ['hanayo', '1f1b']
    """
    candidates: list[Candidate] = []
    refused: dict[str, str] = {}
    for name in dict.fromkeys(schedule_names() if names is None else names):
        Request(name, num_ranks, num_microbatches, num_waves, None, costs, activation_budget)  # what is wrong for all
        try:
            sizes: dict[str, Any] = {
                **sizes_for(name, num_waves),
                "num_ranks": num_ranks,
                "num_microbatches": num_microbatches,
            }
            candidates.append(_candidate(name, sizes, costs or CostModel(), activation_budget, steps))
        except HanayoError as error:
            refused[name] = str(error).partition("\n")[0]
    return Comparison(tuple(sorted(candidates, key=lambda one: (one.timeline.makespan, one.peak, one.name))), refused)


def _candidate(name: str, sizes: dict[str, Any], costs: CostModel, budget: float | None, steps: int) -> Candidate:
    if any(isinstance(getattr(costs, field.name), tuple) for field in fields(costs)):
        costs = merged(costs, build(name, **sizes).chain_length)
    inside = True
    try:
        schedule = build(name, **sizes, costs=costs, activation_budget=budget)
    except HanayoError:
        if budget is None:
            raise
        schedule, inside = build(name, **sizes, costs=costs), False
    timeline = simulate(schedule, costs, steps)
    return Candidate(name, schedule, timeline, inside and (budget is None or max(timeline.peak_activations) <= budget))


def merged(costs: CostModel, num_stages: int) -> CostModel:
    """Per-stage costs for fewer, larger stages, where each holds as many of the smaller ones in a row.

        8 stages   1 1 1 2 | 1 1 1 1        compute is added up; a message leaves the last of each
        2 stages         5 | 4

    Raises:
        HanayoError: the stages given don't divide so.
    """
    given: dict[str, Any] = {field.name: getattr(costs, field.name) for field in fields(costs)}
    return replace(costs, **{name: _merged(name, value, num_stages) for name, value in given.items()})


def _merged(name: str, value: Any, num_stages: int) -> Any:
    if not isinstance(value, tuple) or len(value) == num_stages:
        return value
    if name == "message" and (len(value) + 1) % num_stages == 0:
        value = (*value, 0.0)  # one per border was given
    run, rest = divmod(len(value), num_stages)
    if rest or not run:
        raise HanayoError(f"{name} has {len(value)} values, which can't be shared evenly by {num_stages} stages")
    if name == "message":
        return value[run - 1 :: run]
    return tuple(sum(value[start : start + run]) for start in range(0, len(value), run))


def messages_per_microbatch(schedule: Schedule) -> float:
    """How many messages between ranks one micro-batch needs, forward and, in a schedule that trains, backward."""
    ranks, length = schedule.stage_ranks, schedule.chain_length
    crossings = sum(
        ranks[stage] != ranks[stage + 1] for stage in range(schedule.num_stages - 1) if (stage + 1) % length
    )
    trains = any(action.kind != "F" for row in schedule.actions for action in row)
    return (1 + trains) * crossings / schedule.num_chains
