"""The layout benchmark: many layouts of one model on eight emulated hosts, against the planner's predictions.

python -m recipes.benchmarks.layouts --table docs/benchmarks/layouts-tables.md --json docs/benchmarks/layouts.json \
    --picture docs/benchmarks/layouts.png
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lightning_hanayo.planner.candidates import Candidate
from lightning_hanayo.planner.estimates import StepModel
from lightning_hanayo.planner.machine import Link, Machine
from lightning_hanayo.schedule import CostModel, simulate
from recipes.benchmarks import cluster
from recipes.benchmarks.case import Candidate as Named
from recipes.benchmarks.cluster import Cluster, checked
from recipes.benchmarks.harness import (
    Columns,
    Findings,
    Summary,
    describe,
    ms,
    new_parser,
    number,
    page,
    read,
    run,
    run_on_cluster,
    span,
    stored,
    table,
    whole,
)
from recipes.benchmarks.layouts.cases import HOSTS, INSTANT, PROBES, Contender, Model, contenders, is_megatron, layouts
from recipes.benchmarks.layouts.rank import MESSAGE_FLOATS, PROBED, SHARE_SECONDS, Plan, Record, case_of, check, work
from recipes.paper.figure import BLUE, GREY, INK, ORANGE, new, plain, save
from recipes.paper.page import percent

_NEWTON, _SMALL = 6, 1e-6
"""steps of the search for the runtime's times, and seconds for differences"""


@dataclass(frozen=True)
class Step:
    """One layout, measured and predicted, in seconds."""

    candidate: Candidate
    measured: Summary
    predicted: float
    """simulated"""
    closed: float
    """by the closed form"""

    @property
    def error(self) -> float:
        """By how much the prediction is longer."""
        return self.predicted / self.measured.median - 1


@dataclass(frozen=True)
class Turn:
    """One schedule of the paper's comparison, in seconds."""

    contender: Contender
    measured: Summary
    predicted: float


@dataclass(frozen=True)
class Outcome:
    """All of it."""

    machine: Machine
    steps: tuple[Step, ...]
    """the fastest first"""
    turns: tuple[Turn, ...]

    @property
    def correlation(self) -> float:
        """Spearman's, of predicted and measured steps."""
        return spearman([one.predicted for one in self.steps], [one.measured.median for one in self.steps])

    @property
    def median_error(self) -> float:
        """Of the steps, without sign."""
        return median(abs(one.error) for one in self.steps)

    @property
    def chosen(self) -> Step:
        """The one that is predicted to be the fastest."""
        return min(self.steps, key=lambda one: one.predicted)

    @property
    def megatron(self) -> Step:
        """The fastest of those that Megatron's rule takes."""
        return min((one for one in self.steps if is_megatron(one.candidate)), key=lambda one: one.measured.median)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        figures = {
            "correlation": self.correlation,
            "median_error": self.median_error,
            "chosen_over_best": self.chosen.measured.median / self.steps[0].measured.median,
            "chosen_over_megatron": self.chosen.measured.median / self.megatron.measured.median,
        }
        steps = [asdict(one) | {"error": one.error} for one in self.steps]
        return figures | {"machine": asdict(self.machine), "steps": steps, "paper": self.turns}


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of ranks, without ties.

    Example:
        >>> spearman([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
        0.5
    """
    count = len(one)
    places = [
        {index: place for place, index in enumerate(sorted(range(count), key=values.__getitem__))}
        for values in (one, other)
    ]
    squares = sum((places[0][index] - places[1][index]) ** 2 for index in range(count))
    return 1 - 6 * squares / (count * (count**2 - 1))


def link_of(records: Sequence[Record]) -> Link:
    """Latency and bandwidth of collectives, from two sizes."""
    small, large = (max(record.collective[size] for record in records) for size in PROBED)
    hosts = len(records)
    first, second = (size * (hosts - 1) for size in PROBED)
    bandwidth = (second - first) / (large - small)
    return Link(max(0.0, small - first / bandwidth), bandwidth)


def runtime_of(model: Model, link: Link, seconds: Sequence[float]) -> tuple[float, float]:
    """The runtime's seconds per action and per layer, with which `PROBES` take so long without compute."""

    def steps(action: float, layer: float) -> list[float]:
        known = StepModel(model.instant.facts, model.instant.machine(link, action, layer))
        return [known.simulated(one).seconds for one in PROBES]

    action = layer = 0.0
    for _ in range(_NEWTON):  # what ranks wait for changes with the times, so steps aren't quite linear in them
        now = steps(action, layer)
        (a, b), (c, d) = (
            [(longer - before) / _SMALL for longer, before in zip(one, now, strict=True)]
            for one in (steps(action + _SMALL, layer), steps(action, layer + _SMALL))
        )
        first, second = (taken - before for taken, before in zip(seconds, now, strict=True))
        determinant = a * d - b * c
        action = max(0.0, action + (first * d - second * c) / determinant)
        layer = max(0.0, layer + (a * second - b * first) / determinant)
    return action, layer


def contender_action(seconds: float, message: float) -> float:
    """The runtime's seconds per action, with which the contender `INSTANT` takes so long without compute."""
    without, with_one = (predict_turn(INSTANT, message, action, 0.0) for action in (0.0, 1e-3))
    return max(0.0, 1e-3 * (seconds - without) / (with_one - without))


def outcome_of(plan: Plan, records: Sequence[Record]) -> Outcome:
    """Put the hosts' records together."""
    link = link_of(records)
    *probes, instant = (max(values) for values in zip(*(record.runtime for record in records), strict=True))
    machine = plan.model.machine(link, *runtime_of(plan.model, link, probes))
    model = StepModel(plan.model.facts, machine)
    steps = []
    for place, candidate in enumerate(plan.layouts):
        rounds = [max(ends) for ends in zip(*(record.steps[place] for record in records), strict=True)]
        predicted, closed = model.simulated(candidate), model.closed_form(candidate)
        steps.append(Step(candidate, Summary.of(rounds), predicted.seconds, closed.seconds))
    small, message = (records[0].messages[floats] for floats in (1, MESSAGE_FLOATS))
    action = contender_action(instant, small)
    turns = [
        Turn(one, Summary.of(_slowest(records, pipe, place)), predict_turn(one, message, action))
        for pipe in plan.pipes
        for place, one in enumerate(contenders(pipe))
    ]
    return Outcome(machine, tuple(sorted(steps, key=lambda one: one.measured.median)), tuple(turns))


def _slowest(records: Sequence[Record], pipe: int, place: int) -> list[float]:
    return [max(ends) for ends in zip(*(record.contenders[pipe][place] for record in records), strict=True)]


def predict_turn(one: Contender, message: float, action: float, seconds: float = SHARE_SECONDS) -> float:
    """A step of the paper's comparison, simulated with measured times of a message and of the runtime per action."""
    case, name = case_of(one, seconds), Named(one.schedule, one.waves)
    schedule = case.schedule(name)
    per_rank = schedule.num_stages / schedule.num_ranks
    forward, of_input, of_weight = (
        case.forward + per_rank * action,
        case.backward_input + per_rank * action,
        case.backward_weight,
    )
    return simulate(schedule, CostModel(forward, of_input, of_weight, message=message)).makespan


def text(outcome: Outcome, about: Sequence[str], model: Model) -> str:
    """As Markdown."""
    link = outcome.machine.between_nodes
    best = outcome.steps[0].measured.median
    summary = (
        f"{len(outcome.steps)} layouts. Spearman's correlation of predicted and measured steps "
        f"{outcome.correlation:.3f}; median error {percent(outcome.median_error)}. The plan's first choice, "
        f"{outcome.chosen.candidate}, takes {outcome.chosen.measured.median / best:.3f} of the fastest measured, and "
        f"{outcome.chosen.measured.median / outcome.megatron.measured.median:.2f} of the best of Megatron's rule "
        f"({outcome.megatron.candidate}). Closed forms are within "
        f"{percent(max(abs(one.closed / one.predicted - 1) for one in outcome.steps))} of simulations."
    )
    measured = (
        f"{model.layers} layers, hidden {model.hidden}, {model.samples} sequences of {model.seq} tokens in a step, "
        f"{model.flops_per_second / 1e9:g} GFLOP/s per host. Measured links: {1e3 * link.latency:.2f} ms and "
        f"{link.bandwidth / 1e6:.1f} MB/s per collective; the runtime takes {1e3 * outcome.machine.host_action:.2f} ms "
        f"per action and {1e3 * outcome.machine.host_call:.2f} ms for a layer's forward in it, as two layouts without "
        "compute tell."
    )
    parts: list[str | Sequence[str]] = [about, measured, summary, table(COLUMNS, outcome.steps)]
    for pipe in sorted({one.contender.pipe for one in outcome.turns if one.contender.name == "1f1b"}, reverse=True):
        rows = [one for one in outcome.turns if one.contender in contenders(pipe)]
        parts += [f"P={pipe}, D={8 // pipe}:", table(_paper_columns(rows[0]), rows)]
    return page(*parts)


COLUMNS: Columns = (
    ("layout", lambda one: str(one.candidate)),
    ("schedule", lambda one: one.candidate.schedule if one.candidate.pipe > 1 else "-"),
    ("step ms", lambda one: ms(one.measured.median, 0)),
    ("min-max", lambda one: span(one.measured, 0)),
    ("predicted ms", lambda one: ms(one.predicted, 0)),
    ("error", lambda one: f"{one.error:+.1%}"),
    ("closed form ms", lambda one: ms(one.closed, 0)),
)


def _paper_columns(base: Turn) -> Columns:
    """Compared with the first schedule."""

    def ratios(one: Turn) -> tuple[float, float]:
        return one.measured.median / base.measured.median, one.predicted / base.predicted

    return (
        ("schedule", lambda one: one.contender.name),
        ("ranks", lambda one: str(one.contender.pipe)),
        ("pipelines", lambda one: str(one.contender.pipelines)),
        ("step ms", lambda one: ms(one.measured.median, 0)),
        ("predicted ms", lambda one: ms(one.predicted, 0)),
        ("of gpipe", lambda one: f"{ratios(one)[0]:.3f}"),
        ("predicted", lambda one: f"{ratios(one)[1]:.3f}"),
        ("difference", lambda one: f"{ratios(one)[0] / ratios(one)[1] - 1:+.1%}"),
    )


def draw(outcome: Outcome, path: Path) -> None:
    """Predicted over measured steps."""
    figure = new(6.4, 5.2)
    axes = figure.subplots()
    plain(axes, "Steps of layouts, eight emulated hosts", y="predicted ms")
    most = 1050 * max(max(one.measured.median, one.predicted) for one in outcome.steps)
    axes.plot([0, most], [0, most], color=GREY, linewidth=0.8)
    for one in outcome.steps:
        own = one.candidate
        colour = BLUE if own.cube_size == 1 else ORANGE
        axes.plot(
            1e3 * one.measured.median, 1e3 * one.predicted, "o" if own.pipe > 1 else "s", color=colour, markersize=5
        )
    marked = (("the plan's choice", outcome.chosen), ("Megatron's rule", outcome.megatron))
    for row, (label, one) in enumerate(marked):
        at = 1e3 * one.measured.median, 1e3 * one.predicted
        axes.annotate(label, at, (0.35 + 0.1 * row, 0.08 + 0.08 * row), textcoords="axes fraction", fontsize=8,
                      arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.6})  # fmt: skip
    axes.set(xlabel="measured ms", xlim=(0, most), ylim=(0, most))
    axes.text(0.02, 0.98, "blue: without cubes, orange: with cubes\nsquares: without pipelines", fontsize=8, va="top",
              transform=axes.transAxes)  # fmt: skip
    save(figure, path)


TIMEOUT_S = 1200.0
CHECK_HIDDEN, CHECK_SEQ = 16, 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for. Returns the exit code: 3 where there can be no cluster."""
    parser = new_parser("layouts", __doc__, picture="draw predicted steps over measured ones")
    number(parser, "--mbit", 200.0, "each host's bandwidth, each way, in megabits per second")
    number(parser, "--rounds", 3, "each layout once in each")
    number(parser, "--gflops", 6.0, "of a host, per second")
    parser.add_argument("--some", type=whole, nargs="+", metavar="N", help="some of the layouts, numbered from 1")
    parser.add_argument("--no-paper", action="store_true", help="leave the paper's comparison out")
    parser.add_argument("--from", type=Path, dest="measured", metavar="FILE.json",
                        help="instead: the table and the picture of an earlier run with the same options")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="instead: compute small layers for real, and compare")
    options = parser.parse_args(arguments)
    if options.measured is not None:
        return run(_again, options)
    return run_on_cluster(_check if options.check else _measure, options)


def _chosen(options: argparse.Namespace, samples: int) -> tuple[Any, ...]:
    """The layouts that are run: those asked for, and always the one of Megatron's rule, with which others compare."""
    numbered = enumerate(layouts(samples), 1)
    return tuple(one for number, one in numbered if not options.some or number in options.some or is_megatron(one))


def _check(options: argparse.Namespace) -> Findings:
    model = Model(hidden=CHECK_HIDDEN, seq=CHECK_SEQ)
    plan = Plan(model, _chosen(options, model.samples), 1)
    with Cluster(HOSTS, cluster.Link(10 * options.mbit)) as hosts:
        found = hosts.run(check, plan, TIMEOUT_S)
    errors = {f"{one}, {one.schedule}": max(host[place] for host in found) for place, one in enumerate(plan.layouts)}
    return checked(errors)


def _plan(options: argparse.Namespace) -> Plan:
    model = Model(flops_per_second=1e9 * options.gflops)
    return Plan(model, _chosen(options, model.samples), options.rounds, () if options.no_paper else (8, 4))


def _measure(options: argparse.Namespace) -> Findings:
    link, plan = cluster.Link(options.mbit), _plan(options)
    begin = time.monotonic()
    with Cluster(HOSTS, link) as hosts:
        records = hosts.run(work, plan, TIMEOUT_S)
    took = f"{time.monotonic() - begin:.0f} s in all, {plan.rounds} rounds"
    return _findings(plan, records, describe(link.about(HOSTS), took))


def _again(options: argparse.Namespace) -> Findings:
    def found(data: Any) -> Findings:
        return _findings(_plan(options), [read(Record, one) for one in data["records"]], data["about"])

    return stored(options.measured, found)


def _findings(plan: Plan, records: Sequence[Record], about: list[str]) -> Findings:
    outcome = outcome_of(plan, records)
    data = {"about": about} | outcome.plain() | {"records": records}
    return Findings(text(outcome, about, plan.model), data, {"picture": lambda path: draw(outcome, path)})


if __name__ == "__main__":
    sys.exit(main())
