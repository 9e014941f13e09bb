"""The benchmark of pairs: a rank works on two micro-batches at once, on a cluster of emulated hosts.

python -m recipes.benchmarks.pairs --table docs/benchmarks/pairs-tables.md --json docs/benchmarks/pairs.json
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning_hanayo.schedule.cost import run_alone, run_by_turns
from recipes.benchmarks.cluster import Cluster, Link
from recipes.benchmarks.harness import Findings, describe, new_parser, number, run_on_cluster
from recipes.benchmarks.pairs.rank import (
    PipeResult,
    Plan,
    Record,
    Run,
    parts_of,
    pipe_results_of,
    pipes_of,
    predict_pairs,
    work,
    work_pipes,
)
from recipes.benchmarks.pairs.tables import ALONE, STEADY
from recipes.benchmarks.schemes.names import ONE_D, TWO_D, keeps_weights, three_d
from recipes.benchmarks.tensor3d import layer_of, predict, speed_of
from recipes.benchmarks.tensor3d_rank import Case
from recipes.cube.meshes import ranked_meshes

if TYPE_CHECKING:
    from recipes.benchmarks.pairs.rank import Plan

HOSTS, PIECES = 8, 4
PEER = Run(ONE_D[0], ALONE, queue=False)
"""1-D as Megatron runs it: with which all others are compared"""


def plan_of(link: Link, hidden: int, multiple: int, microbatches: Sequence[int], rounds: int) -> Plan:
    """Micro-batches of `multiple` times as many tokens as the hidden size."""
    meshes = (2, 2, 2), (4, 2, 1), (8, 1, 1)
    runs = [PEER, Run(ONE_D[0], STEADY)]
    for mesh in meshes:
        whole, kept, pieces = three_d(mesh), three_d(mesh, keep_weights=True), three_d(mesh, PIECES)
        runs += [Run(whole, ALONE, queue=False), Run(whole, ALONE), Run(whole, STEADY)]
        runs += [Run(kept, ALONE), Run(kept, STEADY)]
        runs += [] if mesh == meshes[-1] else [Run(pieces, ALONE), Run(pieces, STEADY)]
    tokens = multiple * hidden
    case = Case(f"M = {multiple}h", HOSTS, tokens, hidden, (), speed_of(link, tokens, hidden))
    return Plan(case, tuple(runs), tuple(microbatches), rounds)


SAMPLES = 64
"""of a forecast's micro-batch"""


@dataclass(frozen=True)
class Result:
    """One run. Seconds by number of micro-batches."""

    scheme: str
    way: str
    queue: bool
    bound: float
    """seconds of one micro-batch if compute and link overlapped fully"""
    steps: dict[int, float]
    predicted: dict[int, float]
    """in simulation, on an ideal network; empty one by one, and where weights are kept"""

    def multiple(self, count: int) -> float:
        """The step of so many micro-batches, as a multiple of its bound."""
        return self.steps[count] / count / self.bound

    @property
    def steady(self) -> float:
        """What a further micro-batch adds, as a multiple of its bound."""
        *_, before, last = sorted(self.steps)
        return (self.steps[last] - self.steps[before]) / (last - before) / self.bound


@dataclass(frozen=True)
class Outcome:
    """All runs of one size of micro-batches."""

    title: str
    hidden: int
    results: tuple[Result, ...]


def results_of(plan: Plan, link: Link, records: Sequence[Record]) -> list[Result]:
    """Put the hosts' records together: a step ends when its last host does."""
    found = []
    for place, run in enumerate(plan.runs):
        steps = {
            count: median(max(record.steps[place][count][turn] for record in records) for turn in range(plan.rounds))
            for count in plan.microbatches
        }
        bound = predict(plan.case, run.scheme, link)[0].bound
        may_predict = run.way == STEADY and not keeps_weights(run.scheme)
        counts = plan.microbatches if may_predict else ()
        predicted = {count: predict_pairs(plan.case, run.scheme, link, count) for count in counts}
        found.append(Result(run.scheme, run.way, run.queue, bound, steps, predicted))
    return found


def _lines(heading: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A heading and a table."""
    shown = (head, ["---"] * len(head), *rows)
    return [f"## {heading}", "", *(f"| {' | '.join(map(str, cells))} |".replace(" --- ", "---") for cells in shown)]


def table(outcomes: Sequence[Outcome], about: Sequence[str]) -> str:
    """All tables, as Markdown."""
    lines = [*about, ""]
    for outcome in outcomes:
        peer, paired = outcome.results[:2]
        heads = [f"B = {count}" for count in sorted(peer.steps)]
        head = ("scheme", "micro-batches", "one at a time on the wire", *heads, "steady", "to the simulation",
                "1-D / this", "1-D in pairs / this")  # fmt: skip
        rows = [_row(one, peer, paired) for one in outcome.results]
        lines += [*_lines(f"{outcome.title}, h = {outcome.hidden}: steps / max(compute, link)", head, rows), ""]
    return "\n".join(lines)


def _row(one: Result, peer: Result, paired: Result) -> list[str]:
    counts = sorted(one.steps)
    ratios = [one.steps[count] / one.predicted[count] for count in counts if count in one.predicted]
    to_simulation = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
    gains = [other.steady * other.bound / (one.steady * one.bound) for other in (peer, paired)]
    return [one.scheme, one.way, "yes" if one.queue else "", *(f"{one.multiple(count):.2f}" for count in counts),
            f"{one.steady:.3f}", to_simulation, *(f"{gain:.2f}" for gain in gains)]  # fmt: skip


def pipeline_table(results: Sequence[PipeResult]) -> list[str]:
    """As Markdown."""
    head = ("layout", "one by one, s", "in pairs, s", "gain", "simulated, s", "measured / simulated", "simulated gain")
    rows = [
        (one.layout, f"{one.alone:.2f}", f"{one.paired:.2f}", f"{one.gain:.2f}", f"{one.simulated:.2f}",
         f"{one.paired / one.simulated:.2f}", f"{one.simulated_alone / one.simulated:.2f}")
        for one in results
    ]  # fmt: skip
    return _lines("Two pipeline ranks, each a cube of four hosts", head, rows)


@dataclass(frozen=True)
class Forecast:
    """What a further micro-batch adds on more hosts, in seconds, by scheme: one by one, and in pairs of F and B."""

    hosts: int
    tokens: int
    share: float
    """of a step without overlap in which 1-D communicates"""
    alone: dict[str, float]
    paired: dict[str, float]


def far_ahead(link: Link, hidden: int = 1024) -> list[Forecast]:
    """64 and 512 hosts, in simulation."""
    found = []
    for hosts, cube in ((64, (4, 4, 4)), (512, (8, 8, 8))):
        for tokens in (2 * hidden, 8 * hidden):
            probe = Case("", hosts, tokens, hidden, (), 1.0, batch=SAMPLES)
            best = three_d(ranked_meshes(hosts, layer_of(probe))[0])
            names = (ONE_D[0], *([TWO_D] if hosts == 64 else []), three_d(cube), three_d(cube, PIECES), best)
            without = predict(probe, ONE_D[0], link)[0]
            for share in (0.5, 0.7):
                speed = without.computing * share / (1 - share) / without.receiving
                case = Case("", hosts, tokens, hidden, names, speed, batch=SAMPLES)
                parts = {name: parts_of(case, name, link) for name in names}
                alone = {name: run_alone(forward) + run_alone(backward) for name, (forward, backward) in parts.items()}
                paired = {name: run_by_turns(*both).length for name, both in parts.items()}
                found.append(Forecast(hosts, tokens, share, alone, paired))
    return found


def forecast_table(forecasts: Sequence[Forecast]) -> list[str]:
    """As Markdown."""
    head = ("hosts", "tokens", "1-D communicates", "scheme", "pairs / one by one", "1-D / this", "2-D / this")
    rows = [
        (one.hosts, one.tokens, f"{one.share:.0%}", name, f"{seconds / one.alone[name]:.2f}",
         f"{one.paired[ONE_D[0]] / seconds:.2f}",
         f"{one.paired[TWO_D] / seconds:.2f}" if TWO_D in one.paired else "")
        for one in forecasts
        for name, seconds in one.paired.items()
    ]  # fmt: skip
    return _lines("64 and 512 hosts, predicted: 1-D / this, and 2-D / this, both in pairs", head, rows)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw what a further micro-batch adds, one by one and in pairs, for each scheme."""
    from matplotlib.figure import Figure

    heights = [0.8 + 0.2 * len(outcome.results) for outcome in outcomes]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    panels = figure.subplots(len(outcomes), squeeze=False, height_ratios=heights)[:, 0]
    for panel, outcome in zip(panels, outcomes, strict=True):
        rows = list(outcome.results)[::-1]
        colors = ["tab:gray" if one.way == rows[-1].way else "tab:green" for one in rows]
        bars = panel.barh(range(len(rows)), [one.steady for one in rows], color=colors)
        panel.bar_label(bars, [f"{one.steady:.2f}" for one in rows], padding=3, fontsize=8)
        names = [f"{one.scheme}, {one.way}" + ("" if one.queue else ", all at once") for one in rows]
        panel.set_yticks(range(len(rows)), names, fontsize=8)
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_title(f"{outcome.title}: what a further micro-batch adds / max(compute, link)")
        panel.margins(x=0.1, y=0.01)
    figure.savefig(path, dpi=120)


TIMEOUT_S = 3000.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for. Returns the exit code: 3 where there can be no cluster."""
    parser = new_parser("pairs", __doc__, picture="draw steps, one by one and in pairs")
    number(parser, "--rounds", 2, "each step once in each")
    number(parser, "--mbit", 200.0, "of each link")
    number(parser, "--hidden", 384, "of the layers")
    number(parser, "--tokens", [8, 2], "of a micro-batch, in multiples of the hidden size")
    number(parser, "--microbatches", [2, 4, 8], "of a step, even numbers")
    return run_on_cluster(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    link, begin = Link(options.mbit), time.monotonic()
    plans = [
        plan_of(link, options.hidden, multiple, options.microbatches, options.rounds) for multiple in options.tokens
    ]
    outcomes = [_outcome(plan, link) for plan in plans]
    pipes = pipes_of(link, options.hidden)
    print("pipelines of cubes", file=sys.stderr)
    with Cluster(HOSTS, link) as cluster:
        pipelines = pipe_results_of(pipes, cluster.run(work_pipes, pipes, TIMEOUT_S), link)
    about = describe(link.about(HOSTS), f"{time.monotonic() - begin:.0f} s in all, {options.rounds} rounds")
    far = far_ahead(link)
    data = {
        "about": about,
        "cases": outcomes,
        "pipelines": pipelines,
        "far ahead": far,
    }
    text = "\n".join([table(outcomes, about), *pipeline_table(pipelines), "", *forecast_table(far), ""])
    return Findings(text, data, {"picture": lambda path: draw(outcomes, path)})


def _outcome(plan: Plan, link: Link) -> Outcome:
    """Run each scheme in processes of its own, whose memory and threads no other scheme has used."""
    results: list[Result] = []
    for scheme, runs in groupby(plan.runs, key=lambda run: run.scheme):
        part = replace(plan, runs=tuple(runs))
        print(f"{plan.case.title}: {scheme}, after {len(results)} of {len(plan.runs)} rows", file=sys.stderr)
        with Cluster(HOSTS, link) as cluster:
            results += results_of(part, link, cluster.run(work, part, TIMEOUT_S))
    return Outcome(plan.case.title, plan.case.hidden, tuple(results))


if __name__ == "__main__":
    sys.exit(main())
