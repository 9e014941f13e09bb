"""Combines all ranks' records of one case into a result for each candidate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from recipes.benchmarks.case import Candidate, Case
from recipes.benchmarks.emulated import expected
from recipes.benchmarks.harness import Summary
from recipes.benchmarks.rounds import Record, Records, RoundTiming


@dataclass(frozen=True)
class Result:
    """One candidate in one case. Times are in seconds unless the name says otherwise; bubbles are parts of the step."""

    name: str
    label: str
    runtime: str
    stages_per_rank: int
    step: Summary
    """the time of a step; of several in a row, the time that each one after the first adds"""
    bubble: Summary | None
    """all time except the set compute time, so late sleeps count; None without compute"""
    ideal_step: float
    ideal_bubble: float | None
    peak_activations: float
    """of the rank that holds the most, in M_a"""
    actions_per_rank: float
    overhead_us: float
    """(step - ideal step) / actions of a rank, in microseconds"""
    cpu: float
    """CPU seconds per rank and step"""
    max_error: float | None
    """largest relative error of gradients and losses against one process; None where nothing is computed"""
    ratio_to_peer: float | None = None
    """step time / that of torch's fastest schedule"""
    ratio_at_equal_memory: float | None = None
    """the same, among torch's schedules that hold at most P M_a (or as much as this one, if that is more)"""


@dataclass(frozen=True)
class Outcome:
    """A case with all its results."""

    case: Case
    num_rounds: int
    oversleep_us: float
    """how late a sleep of a rank's forward ends, the median over the ranks"""
    results: tuple[Result, ...]
    refused: dict[str, str]
    hop: float | None = None
    """the measured message time in seconds, if orders were chosen for it"""

    def plain(self) -> dict[str, Any]:
        """For JSON; `hop` only if it was measured."""
        plain = asdict(self)
        if self.hop is None:
            del plain["hop"]
        return plain

    @staticmethod
    def of(plain: Mapping[str, Any]) -> "Outcome":
        """From JSON."""
        spreads = "step", "bubble"
        results = (one | {what: one[what] and Summary(**one[what]) for what in spreads} for one in plain["results"])
        return Outcome(**{**plain, "case": Case(**plain["case"]), "results": tuple(Result(**one) for one in results)})


def outcome_of(case: Case, ranks: Sequence[Records]) -> Outcome:
    """Combine the ranks' records of one case."""
    hop = ranks[0].hop
    case = replace(case, per_action=ranks[0].per_action)
    if hop is not None:
        case = replace(case, planned_message=hop)
    found = [_result(case, candidate, [records.records[candidate] for records in ranks])
             for candidate in ranks[0].records]  # fmt: skip
    rounds = max((len(record.rounds) for record in ranks[0].records.values()), default=0)
    refused = {candidate.label: why for candidate, why in ranks[0].refused.items()}
    late = 1e6 * median(records.oversleep for records in ranks)
    with_ratios = tuple(_with_ratios(one, found, case.num_ranks) for one in found)
    return Outcome(case, rounds, late, with_ratios, refused, hop)


def _result(case: Case, candidate: Candidate, records: Sequence[Record]) -> Result:
    turns = list(zip(*(record.rounds for record in records), strict=True))
    steps = [step_time(turn) for turn in turns]
    ideal = records[0].ideal[-1]
    actions = fmean(records[0].num_actions)
    cpu = median(fmean(timing.cpu for timing in turn) / case.steps for turn in turns)
    middle, stages = median(steps), records[0].num_stages // case.num_ranks
    return Result(
        name=candidate.name,
        label=candidate.label.replace("W planned", f"W={stages // 2}, planned"),
        runtime=candidate.runtime,
        stages_per_rank=stages,
        step=Summary.of(steps),
        bubble=Summary.of([1 - case.busy / step for step in steps]) if case.busy else None,
        ideal_step=ideal,
        ideal_bubble=max(0.0, 1 - case.busy / ideal) if case.busy else None,
        peak_activations=max(records[0].peaks),
        actions_per_rank=actions,
        overhead_us=1e6 * (middle - ideal) / actions,
        cpu=cpu,
        max_error=None if candidate.runtime == "bare" else _error(case, records),
    )


def step_time(turn: Sequence[RoundTiming]) -> float:
    """From the first start to the last end; of several steps the mean time that each after the first adds."""
    ends = [max(timing.ends[step] for timing in turn) for step in range(len(turn[0].ends))]
    if len(ends) == 1:
        return ends[0] - min(timing.start for timing in turn)
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def _error(case: Case, records: Sequence[Record]) -> float:
    gradients, losses = expected(records[0].num_stages, case.num_microbatches, case.width)
    found: Mapping[int, float] = {stage: value for record in records for stage, value in record.gradients.items()}
    pairs = list(zip((found.get(stage, math.nan) for stage in range(len(gradients))), gradients, strict=True))
    pairs += zip([loss for record in records for loss in record.losses], losses, strict=True)
    errors = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _with_ratios(result: Result, all_results: Sequence[Result], num_ranks: int) -> Result:
    limit = max(float(num_ranks), result.peak_activations) + 1e-6
    peers = [other for other in all_results if other.name.startswith("torch-") and other.name != "torch-hanayo-zb"]
    within = [other for other in peers if other.peak_activations <= limit]
    return replace(
        result,
        ratio_to_peer=_ratio(result, peers),
        ratio_at_equal_memory=_ratio(result, within),
    )


def _ratio(result: Result, peers: Sequence[Result]) -> float | None:
    return result.step.median / min(peer.step.median for peer in peers) if peers else None
