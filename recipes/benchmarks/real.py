"""Measures real computation on two ranks, and compares the gain of waves over 1F1B with the predicted gain.

Each rank has a core of its own and runs transformer blocks. First both ranks time their blocks (at the same time, so
that they disturb each other as they do later) and a message. The simulator predicts each schedule's step from these
times; then all schedules run in turn.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import CostModel, Schedule, simulate
from recipes.benchmarks.harness import Findings, ProcessOptions, Summary, cores, run_ranks
from recipes.benchmarks.real_rank import CANDIDATES, PEER, RealCase, RealRecord, schedule_of, work
from recipes.paper.figure import BLUE, GREY, ORANGE, new, plain, save
from recipes.paper.table import markdown, percent

RANKS = 2
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class RealResult:
    """One candidate with one number of micro-batches. A gain of 0.1 is 10 % less time than our 1f1b."""

    name: str
    num_microbatches: int
    step: Summary
    gain: Summary
    """compared within each round"""
    predicted_step: float
    predicted_gain: float
    cpu: float
    """seconds of a core per rank and step"""
    max_error: float
    """of the loss, relative to our 1f1b's"""


@dataclass(frozen=True)
class RealOutcome:
    """The results of all candidates, and the measured times from which they were predicted."""

    priority: str
    costs: CostModel
    """measured seconds for a rank's whole share, with the backward split"""
    whole_backward: float
    """measured seconds of the backward in one piece"""
    results: tuple[RealResult, ...]
    num_rounds: int

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def of(plain: Mapping[str, Any]) -> "RealOutcome":
        """From JSON."""
        spreads = "step", "gain"
        results = (one | {what: Summary(**one[what]) for what in spreads} for one in plain["results"])
        known = {"costs": CostModel(**plain["costs"]), "results": tuple(RealResult(**one) for one in results)}
        return RealOutcome(**{**plain, **known})


def measure(microbatches: Sequence[int], width: int, blocks: int, samples: int, rounds: int) -> RealOutcome:
    """Measure all candidates.

    Raises:
        HanayoError: there are fewer than two cores, or the blocks don't divide.
    """
    mine = cores()
    if len(mine) < RANKS:
        raise HanayoError(f"--real needs {RANKS} cores, a core for each rank; this process may use {len(mine)}")
    if blocks % 4:
        raise HanayoError(f"--blocks {blocks}: two waves have 4 stages per rank; expected a multiple of 4")
    cases = [RealCase(count, width, blocks, samples, rounds) for count in microbatches]
    options = [
        ProcessOptions(realtime=False, core=core) for core in mine[:RANKS]
    ]  # gloo's thread shares the rank's core
    found = run_ranks(work, cases, options, TIMEOUT_S)
    ranks: list[list[RealRecord]] = [records for _, records in found]
    costs, whole = _costs([records[0] for records in ranks])
    results = [
        result
        for place, case in enumerate(cases)
        for result in _results(case, [records[place] for records in ranks], costs, whole)
    ]
    return RealOutcome(f"{found[0][0]}, a core for each rank", costs, whole, tuple(results), rounds)


def _costs(records: Sequence[RealRecord]) -> tuple[CostModel, float]:
    """Average over the ranks, which hold equal blocks."""

    def mean(what: str) -> float:
        return fmean(float(getattr(record, what)) for record in records)

    forward, inputs, weights = mean("forward"), mean("backward_input"), mean("backward_weight")
    return CostModel(forward, inputs, weights, message=mean("message")), mean("backward")


def _results(case: RealCase, ranks: Sequence[RealRecord], costs: CostModel, whole: float) -> list[RealResult]:
    steps = {name: [max(ends) - min(starts) for starts, ends in zip(
        zip(*(record.starts[name] for record in ranks), strict=True),
        zip(*(record.ends[name] for record in ranks), strict=True), strict=True)]
        for name in CANDIDATES}  # fmt: skip
    predicted = {name: _predict(schedule_of(name, case), costs, whole) for name in CANDIDATES}
    losses = {name: next(r.losses[name] for r in ranks if name in r.losses) for name in CANDIDATES}
    base = CANDIDATES[0]
    return [
        RealResult(
            name,
            case.num_microbatches,
            Summary.of(steps[name]),
            Summary.of([1 - mine / theirs for mine, theirs in zip(steps[name], steps[base], strict=True)]),
            predicted[name],
            1 - predicted[name] / predicted[base],
            median(sum(cpus) / len(cpus) for cpus in zip(*(r.cpu[name] for r in ranks), strict=True)),
            abs(losses[name] / losses[base] - 1),
        )
        for name in CANDIDATES
    ]


def _predict(schedule: Schedule, costs: CostModel, whole: float) -> float:
    """The simulated step, with the time measured for the schedule's form of the backward."""
    split = any(action.kind == "W" for row in schedule.actions for action in row)
    model = costs if split else CostModel(costs.forward, whole / 2, whole / 2, message=costs.message)
    return simulate(schedule, model).makespan


def findings(outcome: RealOutcome, machine: Sequence[str]) -> Findings:
    """Returns what the command prints and writes."""
    data = {"machine": machine, "real": outcome.plain()}
    return Findings(table(outcome, machine), data, {"picture": lambda path: draw(outcome, path)})


def table(outcome: RealOutcome, machine: Sequence[str]) -> str:
    """The results as Markdown."""
    costs, unit = outcome.costs, 1e3
    forward, inputs, weights = costs.forward, costs.backward_input, costs.backward_weight
    assert isinstance(forward, float) and isinstance(inputs, float) and isinstance(weights, float)
    assert isinstance(costs.message, float)
    about = (
        f"A rank's share of one micro-batch alone: F {unit * forward:.1f}, I {unit * inputs:.1f}, W "
        f"{unit * weights:.1f} ms, the backward in one piece {unit * outcome.whole_backward:.1f} ms; a message "
        f"{unit * costs.message:.2f} ms. {outcome.num_rounds} rounds. Gains are over our 1f1b of the same round."
    )
    head = (
        "schedule",
        "B",
        "step ms",
        "min-max",
        "predicted ms",
        "gain",
        "min-max",
        "predicted gain",
        "reached",
        "CPU ms",
    )
    rows = map(_row, outcome.results)
    parts = [
        "# A pipeline with real computation",
        "\n".join(f"- {line}" for line in machine),
        about,
        markdown(head, rows),
    ]
    return "\n\n".join(parts) + "\n"


def _row(result: RealResult) -> tuple[str, ...]:
    reached = result.gain.median / result.predicted_gain if result.predicted_gain > 1e-9 else math.nan
    return (
        result.name,
        str(result.num_microbatches),
        f"{1e3 * result.step.median:.1f}",
        f"{1e3 * result.step.least:.1f}-{1e3 * result.step.most:.1f}",
        f"{1e3 * result.predicted_step:.1f}",
        percent(result.gain.median),
        f"{percent(result.gain.least)} to {percent(result.gain.most)}",
        "-" if result.name in (CANDIDATES[0], PEER) else percent(result.predicted_gain),
        "-" if math.isnan(reached) else percent(reached, 0),
        f"{1e3 * result.cpu:.0f}",
    )


def draw(outcome: RealOutcome, path: Path) -> None:
    """Draw bars: gains over 1f1b, measured and predicted."""
    shown = [result for result in outcome.results if result.name != CANDIDATES[0]]
    figure = new(2 + 0.9 * len(shown), 3.4)
    axes = figure.subplots()
    plain(axes, "Gain over 1f1b, two ranks, real computation", y="%")
    for place, result in enumerate(shown):
        colour = GREY if result.name == PEER else BLUE
        axes.bar(place - 0.2, 100 * result.gain.median, width=0.4, color=colour)
        axes.vlines(place - 0.2, 100 * result.gain.least, 100 * result.gain.most, color="black", linewidth=1)
        axes.bar(place + 0.2, 100 * result.predicted_gain, width=0.4, color=ORANGE)
    axes.set_xticks(range(len(shown)), [f"{r.name}\nB={r.num_microbatches}" for r in shown], fontsize=7)
    axes.text(1.0, 1.0, "orange: predicted", transform=axes.transAxes, ha="right", va="top", fontsize=8)
    save(figure, path)
