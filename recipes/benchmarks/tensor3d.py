"""The tensor-parallel benchmark: 1-D, 2-D and 3-D side by side, on a cluster of emulated hosts with a set bandwidth.

python -m recipes.benchmarks.tensor3d --table tensor3d.md --picture tensor3d.png --trace tensor3d-trace.png
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from recipes.benchmarks.cluster import Cluster, Link, checked
from recipes.benchmarks.harness import (
    Columns,
    Findings,
    Summary,
    describe,
    ms,
    new_parser,
    number,
    page,
    run_on_cluster,
    span,
    table,
)
from recipes.benchmarks.schemes.log import Replay, elements_of, replay
from recipes.benchmarks.schemes.names import ONE_D, TWO_D, mesh_of, three_d
from recipes.benchmarks.tensor3d_rank import Case, Collective, Plan, Record, Steps, check_all, dry_run, work
from recipes.cube.meshes import TransformerLayer, ranked_meshes
from recipes.cube.schemes import OneD, two_d
from recipes.paper.figure import BLUE, GREEN, GREY, INK, ORANGE, new, plain, save
from recipes.paper.page import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BYTES = 4
"""of an element"""


@dataclass(frozen=True)
class Transfer:
    """One collective: seconds, and how they compare with the bytes of the ring algorithm at the link's rate."""

    kind: str
    hosts: int
    megabytes: float
    ideal: float
    gloo: float
    ours: float


@dataclass(frozen=True)
class Result:
    """One scheme in one case. Seconds and bytes of a step, on each host."""

    name: str
    step: Summary
    forward: float
    predicted: Replay
    volume: float
    """bytes received as the formula says"""
    moved: float
    """bytes received as the program's own transfers have it"""
    on_the_wire: float
    """bytes the interfaces counted, headers included"""
    gain: float | None = None
    """the quickest 1-D's step / this one, of the same round: the median; None where 1-D wasn't run"""
    predicted_gain: float | None = None


@dataclass(frozen=True)
class Outcome:
    """A case with all its results."""

    case: Case
    results: tuple[Result, ...]

    def of(self, name: str) -> Result:
        """One of them."""
        return next(result for result in self.results if result.name == name)


def layer_of(case: Case) -> TransformerLayer:
    """For the formulas; heads that any mesh divides."""
    return TransformerLayer(case.tokens, case.hidden, heads=case.hidden)


def volume_of(case: Case, name: str) -> float:
    """Elements a host receives in a step, by the planner's formulas."""
    layer = layer_of(case)
    if name in ONE_D:
        return case.layers * OneD(case.hosts).volume(layer)
    if name == TWO_D:
        return case.layers * two_d(round(case.hosts**0.5)).volume(layer)
    return case.layers * layer.volume(mesh_of(name)).total


def predict(case: Case, name: str, link: Link) -> tuple[Replay, float]:
    """The step's replay, and the elements that are moved. On squares the slower one of two kinds of hosts."""
    programs = [dry_run(case, name, rank) for rank in ((0, 1) if name == TWO_D else (0,))]
    replays = [replay(events, link.bytes_per_second / BYTES) for events in programs]
    return max(replays, key=lambda one: one.step), elements_of(programs[0])


def outcome_of(case: Case, link: Link, hosts: Sequence[dict[str, Steps]]) -> Outcome:
    """Put the hosts' records together."""
    found = [_result(case, link, name, [steps[name] for steps in hosts]) for name in case.schemes]
    rounds = {name: _rounds([steps[name].end for steps in hosts]) for name in case.schemes}
    peers = [name for name in case.schemes if name in ONE_D]
    if not peers:
        return Outcome(case, tuple(found))
    best = [min(ends) for ends in zip(*(rounds[name] for name in peers), strict=True)]
    ideal = min(result.predicted.step for result in found if result.name in peers)
    return Outcome(case, tuple(_beside(result, rounds[result.name], best, ideal) for result in found))


def _beside(result: Result, steps: Sequence[float], best: Sequence[float], ideal: float) -> Result:
    gain = median(peer / own for peer, own in zip(best, steps, strict=True))
    return Result(**(vars(result) | {"gain": gain, "predicted_gain": ideal / result.predicted.step}))


def _rounds(by_host: Sequence[Sequence[float]]) -> list[float]:
    """Each round's, of the last host."""
    return [max(ends) for ends in zip(*by_host, strict=True)]


def _result(case: Case, link: Link, name: str, hosts: Sequence[Steps]) -> Result:
    predicted, elements = predict(case, name, link)
    return Result(
        name=name,
        step=Summary.of(_rounds([steps.end for steps in hosts])),
        forward=median(_rounds([steps.forward for steps in hosts])),
        predicted=predicted,
        volume=BYTES * volume_of(case, name),
        moved=BYTES * elements,
        on_the_wire=fmean(median(steps.received) for steps in hosts),
    )


def transfers_of(link: Link, records: Sequence[Record]) -> list[Transfer]:
    """Collectives, as the last host saw them."""
    return [_combined(link, same) for same in zip(*(record.collectives for record in records), strict=True)]


def _combined(link: Link, same: Sequence[Collective]) -> Transfer:
    first = same[0]
    twice = 2 if first.kind == "all-reduce" else 1
    ideal = twice * first.megabytes * 2**20 * (first.hosts - 1) / first.hosts / link.bytes_per_second
    gloo, ours = (median(_rounds([getattr(one, whose) for one in same])) for whose in ("gloo", "ours"))
    return Transfer(first.kind, first.hosts, first.megabytes, ideal, gloo, ours)


FAR, PAPER = 64, {ONE_D[0]: 2.32, TWO_D: 1.57}
"""the paper's: 3-D over each of them, 64 GPUs"""
SCALING = ("strong", "weak")


@dataclass(frozen=True)
class Forecast:
    """A step that wasn't run. `share`: of its step, without overlap, that 1-D communicates."""

    case: Case
    share: float
    steps: dict[str, Replay]


def far_ahead(link: Link, hidden: int = 1024) -> list[Forecast]:
    """64 hosts: as fast as makes 1-D communicate most of its time there, or less of it; short and long batches."""
    found = []
    for tokens in (2 * hidden, 8 * hidden):
        probe = Case("far", FAR, tokens, hidden, (), 1.0, batch=FAR)
        best = three_d(ranked_meshes(FAR, layer_of(probe))[0])
        names = (ONE_D[0], TWO_D, three_d((4, 4, 4)), best)
        alone, _ = predict(probe, ONE_D[0], link)
        for share in (0.5, 0.7, 0.9):
            speed = alone.computing * share / (1 - share) / alone.receiving
            case = Case("far", FAR, tokens, hidden, names, speed, batch=FAR)
            found.append(Forecast(case, share, {name: predict(case, name, link)[0] for name in names}))
    return found


def text(
    about: Sequence[str], transfers: Sequence[Transfer], outcomes: Sequence[Outcome], far: Sequence[Forecast]
) -> str:
    """All tables."""
    parts: list[str | Sequence[str]] = [about]
    if transfers:
        parts += ["## Collectives", table(COLLECTIVE_COLUMNS, transfers)]
    for outcome in outcomes:
        if outcome.case.title not in SCALING:
            parts += [f"## {title(outcome.case)}", table(COLUMNS, outcome.results)]
    for kind in SCALING:
        if rows := [(one.case, result) for one in outcomes if one.case.title == kind for result in one.results]:
            parts += [f"## {kind.capitalize()} scaling", table(SCALING_COLUMNS, rows)]
    about_far = (
        f"In brackets: if nothing overlapped. On {FAR} GPUs the paper measured, for its cube, {PAPER[ONE_D[0]]} over "
        f"1-D and {PAPER[TWO_D]} over 2-D."
    )
    return page(*parts, f"## {FAR} hosts, predicted", about_far, table(FAR_COLUMNS, far))


def _times(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.2f}"


def _moved(one: Result) -> str:
    return f"{one.volume / 1e6:.2f}" + ("" if one.moved == one.volume else f" (moved {one.moved / 1e6:.2f})")


def _over(one: Forecast, slow: int, quick: int) -> str:
    """The speed of one scheme over another's, and in brackets without overlap."""
    a, b = (one.steps[one.case.schemes[place]] for place in (slow, quick))
    return f"{a.step / b.step:.2f} ({a.apart / b.apart:.2f})"


COLUMNS: Columns = (
    ("scheme", lambda one: one.name),
    ("step ms", lambda one: ms(one.step.median, 0)),
    ("min-max", lambda one: span(one.step, 0)),
    ("forward ms", lambda one: ms(one.forward, 0)),
    ("predicted ms", lambda one: ms(one.predicted.step, 0)),
    ("measured / predicted", lambda one: f"{one.step.median / one.predicted.step:.3f}"),
    ("compute ms", lambda one: ms(one.predicted.computing, 0)),
    ("link ms", lambda one: ms(one.predicted.receiving, 0)),
    ("of the longer", lambda one: f"{one.step.median / one.predicted.bound:.2f}"),
    ("gain over 1-D", lambda one: _times(one.gain)),
    ("predicted gain", lambda one: _times(one.predicted_gain)),
    ("reached", lambda one: percent(one.gain / one.predicted_gain, 0) if one.gain and one.predicted_gain else "-"),
    ("MB", _moved),
    ("wire / formula", lambda one: f"{one.on_the_wire / one.volume:.4f}" if one.volume else "-"),
)
COLLECTIVE_COLUMNS: Columns = (
    ("collective", lambda one: one.kind),
    ("hosts", lambda one: str(one.hosts)),
    ("MB", lambda one: f"{one.megabytes:g}"),
    ("ideal ms", lambda one: ms(one.ideal)),
    ("gloo ms", lambda one: ms(one.gloo)),
    ("of ideal", lambda one: f"{one.gloo / one.ideal:.2f}"),
    ("ours ms", lambda one: ms(one.ours)),
    ("of ideal", lambda one: f"{one.ours / one.ideal:.2f}"),
)
SCALING_COLUMNS: Columns = (
    ("hosts", lambda one: str(one[0].hosts)),
    ("tokens", lambda one: str(one[0].tokens)),
    ("scheme", lambda one: one[1].name),
    ("step ms", lambda one: ms(one[1].step.median, 0)),
    ("predicted ms", lambda one: ms(one[1].predicted.step, 0)),
    ("gain over 1-D", lambda one: _times(one[1].gain)),
    ("predicted gain", lambda one: _times(one[1].predicted_gain)),
)
FAR_COLUMNS: Columns = (
    ("tokens", lambda one: f"{one.case.tokens} (M = {one.case.tokens // one.case.hidden} h)"),
    ("1-D communicates", lambda one: percent(one.share, 0)),
    ("cube over 1-D", lambda one: _over(one, 0, 2)),
    ("best mesh", lambda one: one.case.schemes[3]),
    ("over 1-D", lambda one: _over(one, 0, 3)),
    ("cube over 2-D", lambda one: _over(one, 1, 2)),
    ("best over 2-D", lambda one: _over(one, 1, 3)),
)


def title(case: Case) -> str:
    """The case in a line."""
    ratio = case.tokens / case.hidden
    return (
        f"{case.hosts} hosts, {case.layers} layers of {case.hidden}, {case.tokens} tokens (M = {ratio:g} h), "
        f"{case.flops_per_second / 1e9:.2f} GFLOP/s"
    )


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """A row of bars for each case; scaling as lines."""
    shown = [outcome for outcome in outcomes if outcome.case.title not in SCALING]
    lines = [kind for kind in SCALING if any(outcome.case.title == kind for outcome in outcomes)]
    figure = new(9.5, 2.6 * (len(shown) + bool(lines)))
    rows = figure.subfigures(len(shown) + bool(lines), 1, squeeze=False)[:, 0]
    for part, outcome in zip(rows, shown, strict=False):
        _bars(part.subplots(), outcome)
    if lines:
        for axes, kind in zip(rows[-1].subplots(1, len(lines), squeeze=False)[0], lines, strict=True):
            _lines(axes, kind, [outcome for outcome in outcomes if outcome.case.title == kind])
    save(figure, path)


def _bars(axes: "Axes", outcome: Outcome) -> None:
    plain(axes, title(outcome.case), y="ms per step")
    for place, result in enumerate(outcome.results):
        step, predicted = result.step, result.predicted
        axes.bar(place - 0.2, 1e3 * step.median, width=0.38, color=BLUE if result.name.startswith("3-d") else GREY)
        axes.vlines(place - 0.2, 1e3 * step.least, 1e3 * step.most, color=INK, linewidth=1)
        axes.bar(place + 0.2, 1e3 * predicted.step, width=0.38, color=ORANGE)
        axes.hlines(1e3 * predicted.bound, place - 0.4, place + 0.4, color=GREEN, linewidth=1.5)
        if result.gain is not None:
            axes.text(place - 0.2, 1e3 * step.most, f"{result.gain:.2f}x", ha="center", va="bottom", fontsize=7)
    axes.set_xlim(-0.6, max(5, len(outcome.results)) - 0.4)
    axes.set_xticks(range(len(outcome.results)), [result.name for result in outcome.results], fontsize=8)
    axes.text(1.0, 1.03, "blue, grey: measured; orange: predicted; green: the longer of compute and link",
              transform=axes.transAxes, ha="right", va="bottom", fontsize=7)  # fmt: skip


def _lines(axes: "Axes", kind: str, outcomes: Sequence[Outcome]) -> None:
    plain(axes, f"{kind} scaling", x="hosts", y="ms per step")
    hosts = [outcome.case.hosts for outcome in outcomes]
    for place, colour, label in ((0, GREY, "1-D"), (1, BLUE, "3-D, the mesh that moves least")):
        results = [outcome.results[min(place, len(outcome.results) - 1)] for outcome in outcomes]
        axes.plot(hosts, [1e3 * one.step.median for one in results], marker="o", color=colour, label=label)
        axes.plot(hosts, [1e3 * one.predicted.step for one in results], linestyle=":", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks(hosts, [str(count) for count in hosts])
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False, title="dotted: predicted", title_fontsize=7)


def draw_trace(plan: Plan, records: Sequence[Record], link: Link, path: Path) -> None:
    """Single steps, host by host: when it computes, and how full its link is."""
    shown = _traced(plan)
    figure = new(9.5, 3.2 * len(shown))
    for axes, (place, name) in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        case = plan.cases[place]
        plain(axes, f"{name}: {title(case)}", x="ms; blue: computing; orange: receiving, as high as the link is full")
        for row, record in enumerate(records[: case.hosts]):
            _trace_row(axes, row, record.steps[place][name], link)
        axes.set_yticks(range(case.hosts), [f"host {row}" for row in range(case.hosts)], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
    save(figure, path)


def _traced(plan: Plan) -> list[tuple[int, str]]:
    """1-D and the best mesh of the first case, and the case in which compute can hide all."""
    shown = [(0, name) for name in (plan.cases[0].schemes[0], plan.cases[0].schemes[-1])]
    return shown + [(i, case.schemes[0]) for i, case in enumerate(plan.cases) if case.title == "overlap"]


def _trace_row(axes: "Axes", row: int, steps: Steps, link: Link) -> None:
    """Computing above the line, the interface's bytes below."""
    for begin, end in steps.spans:
        axes.broken_barh([(1e3 * begin, 1e3 * (end - begin))], (row - 0.42, 0.38), color=BLUE, linewidth=0)
    for (begin, before), (end, after) in zip(steps.samples, steps.samples[1:], strict=False):
        full = (after - before) / max(end - begin, 1e-6) / link.bytes_per_second
        if full > 0.02:
            height = 0.38 * min(1.0, full)
            span = [(1e3 * begin, 1e3 * (end - begin))]
            axes.broken_barh(span, (row + 0.40 - height, height), color=ORANGE, linewidth=0)


HOSTS, SHARE, TIMEOUT_S = 8, 0.7, 1200.0
PIECES = 4
COLLECTIVES = (2, 2.0), (4, 2.0), (8, 2.0), (8, 8.0)
PARTS = ("collectives", "shapes", "overlap", "two-d", "scaling")
MESHES = (2, 2, 2), (4, 2, 1), (8, 1, 1)
CHECKED = (
    *((name, HOSTS) for name in (*ONE_D, *map(three_d, MESHES), three_d(MESHES[0], PIECES))),
    (TWO_D, 4),
    (three_d((2, 2, 1)), 4),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for. Returns the exit code: 3 where there can be no cluster."""
    parser = new_parser("tensor3d", __doc__, picture="draw steps, measured next to predicted",
                        trace="draw each host's computing and receiving")  # fmt: skip
    number(parser, "--mbit", 200.0, "each host's bandwidth, each way, in megabits per second")
    number(parser, "--hidden", 384, "of the largest layers")
    number(parser, "--rounds", 5, "each scheme once in each; other shapes take three")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                        help=f"of {', '.join(PARTS)} (default: all)")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="instead: compute small layers for real, and compare")
    options = parser.parse_args(arguments)
    return run_on_cluster(_check if options.check else _measure, options)


def speed_of(link: Link, tokens: int, hidden: int, layers: int = 2) -> float:
    """A host's flops per second, so that 1-D on eight of them would compute for 0.3 of a step without overlap."""
    alone, _ = predict(Case("", HOSTS, tokens, hidden, (ONE_D[0],), 1.0, layers), ONE_D[0], link)
    return alone.computing * SHARE / (1 - SHARE) / alone.receiving


def cases(link: Link, hidden: int, rounds: int, parts: Sequence[str]) -> list[Case]:
    """All of them: for each shape, the cube and the meshes that move the least."""
    small = 2 * hidden // 3 // 8 * 8
    found = []
    if "shapes" in parts:
        for tokens, width, times in ((8 * hidden, hidden, rounds), (2 * hidden, hidden, 3), (8 * small, small, 3)):
            best, *weights_only = _best(HOSTS, tokens, width)
            in_pieces = [three_d(mesh_of(name), PIECES) for name in (three_d((1, HOSTS, 1)), three_d((2, 2, 2)), best)]
            names = (*ONE_D, in_pieces[0], three_d((2, 2, 2)), in_pieces[1], best, in_pieces[2], *weights_only)
            speed = speed_of(link, tokens, width)
            found.append(Case("shapes", HOSTS, tokens, width, names, speed, rounds=times))
    if "overlap" in parts:
        names, speed = tuple(_best(HOSTS, 16 * small, small)), speed_of(link, 16 * small, small)
        found.append(Case("overlap", HOSTS, 16 * small, small, names, speed, layers=4))
    speed = speed_of(link, 8 * small, small)
    if "two-d" in parts:
        names = (*ONE_D, TWO_D, *_best(4, 8 * small, small))
        found.append(Case("two-d", 4, 8 * small, small, names, speed))
    if "scaling" in parts:
        for hosts in (1, 2, 4, 8):
            for title, tokens in (("strong", 8 * small), ("weak", small * hosts)):
                names = (ONE_D[0], _best(hosts, tokens, small)[0])
                found.append(Case(title, hosts, tokens, small, names, speed, layers=1))
    return found


def _best(hosts: int, tokens: int, hidden: int) -> list[str]:
    """The mesh that moves the least, and the one that moves weights only, which the most compute can hide."""
    first = ranked_meshes(hosts, TransformerLayer(tokens, hidden, heads=hidden))[0]
    return list(dict.fromkeys([three_d(first), three_d((hosts, 1, 1))]))


def _check(options: argparse.Namespace) -> Findings:
    with Cluster(HOSTS, Link(options.mbit)) as cluster:
        found = cluster.run(check_all, CHECKED, TIMEOUT_S)
    return checked({name: max(host[name] for host in found if name in host) for name in found[0]})


def _measure(options: argparse.Namespace) -> Findings:
    link = Link(options.mbit)
    plan = Plan(
        tuple(cases(link, options.hidden, options.rounds, options.parts)),
        COLLECTIVES if "collectives" in options.parts else (),
    )
    begin = time.monotonic()
    with Cluster(HOSTS, link) as cluster:
        records = cluster.run(work, plan, TIMEOUT_S)
    took = time.monotonic() - begin
    outcomes = [
        outcome_of(case, link, [record.steps[place] for record in records[: case.hosts]])
        for place, case in enumerate(plan.cases)
    ]
    transfers = transfers_of(link, records)
    far = far_ahead(link)
    about = describe(link.about(HOSTS), f"{took:.0f} s in all")
    data = {"machine": about, "transfers": transfers,
            "cases": outcomes, "at 64 hosts": far}  # fmt: skip
    pictures = {
        "picture": lambda path: draw(outcomes, path),
        "trace": lambda path: draw_trace(plan, records, link, path),
    }
    return Findings(text(about, transfers, outcomes, far), data, pictures)


if __name__ == "__main__":
    sys.exit(main())
