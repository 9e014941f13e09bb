"""The tables and the picture: steps as multiples of the longer one of compute and link."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lightning_hanayo.overlap.pair_time import best_order, run_alone
from lightning_hanayo.planner.candidates import ranked_meshes
from recipes.benchmarks.cluster import Link
from recipes.benchmarks.pairs.cases import PIECES
from recipes.benchmarks.pairs.pipes import PipeResult
from recipes.benchmarks.pairs.rank import Plan, Record, Run
from recipes.benchmarks.schemes.log import segments_of
from recipes.benchmarks.schemes.names import ONE_D, TWO_D, three_d
from recipes.benchmarks.tensor3d_rank import Case, dry_run
from recipes.benchmarks.tensor3d_report import BYTES, layer_of, predict

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
    """in the simulation that pairs are planned with; empty one by one"""

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
        found.append(Result(run.scheme, run.way, run.queue, bound, steps, records[0].predicted[place]))
    return found


def find(outcome: Outcome, run: Run) -> Result:
    """One of them."""
    wanted = run.scheme, run.way, run.queue
    return next(one for one in outcome.results if (one.scheme, one.way, one.queue) == wanted)


def table(outcomes: Sequence[Outcome], about: Sequence[str]) -> str:
    """All tables, as Markdown."""
    lines = [*about, ""]
    for outcome in outcomes:
        peer, paired = outcome.results[:2]
        counts = sorted(peer.steps)
        heads = [f"B = {count}" for count in counts]
        lines += [
            f"## {outcome.title}, h = {outcome.hidden}: steps / max(compute, link)",
            "",
            f"| scheme | micro-batches | one at a time on the wire | {' | '.join(heads)} | steady | "
            f"to the simulation | 1-D / this | 1-D in pairs / this |",
            "|---|---|---|" + "---|" * (len(counts) + 4),
        ]
        lines += [_row(one, peer, paired) for one in outcome.results] + [""]
    return "\n".join(lines)


def _row(one: Result, peer: Result, paired: Result) -> str:
    counts = sorted(one.steps)
    ratios = [one.steps[count] / one.predicted[count] for count in counts if count in one.predicted]
    to_simulation = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
    gains = [other.steady * other.bound / (one.steady * one.bound) for other in (peer, paired)]
    cells = [one.scheme, one.way, "yes" if one.queue else "", *(f"{one.multiple(count):.2f}" for count in counts),
             f"{one.steady:.3f}", to_simulation, *(f"{gain:.2f}" for gain in gains)]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def pipeline_table(results: Sequence[PipeResult]) -> list[str]:
    """As Markdown."""
    lines = [
        "## Two pipeline ranks, each a cube of four hosts",
        "",
        "| layout | one by one, s | in pairs, s | gain | simulated, s | measured / simulated | simulated gain |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results:
        cells = (one.layout, f"{one.alone:.2f}", f"{one.paired:.2f}", f"{one.gain:.2f}", f"{one.simulated:.2f}",
                 f"{one.paired / one.simulated:.2f}", f"{one.simulated_alone / one.simulated:.2f}")  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


@dataclass(frozen=True)
class Forecast:
    """What a further micro-batch adds on more hosts, in seconds, by scheme: one by one, and in pairs of F and B."""

    hosts: int
    tokens: int
    share: float
    """of a step without overlap in which 1-D communicates"""
    alone: dict[str, float]
    paired: dict[str, float]


def far_ahead(link: Link, hidden: int = 1024, tries: int = 20_000) -> list[Forecast]:
    """64 and 512 hosts, in the simulation that the measured pairs are planned with."""
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
                rate = link.bytes_per_second / BYTES
                parts = {name: segments_of(dry_run(case, name), rate) for name in names}
                alone = {name: run_alone(forward) + run_alone(backward) for name, (forward, backward) in parts.items()}
                paired = {name: best_order(*both, tries).seconds for name, both in parts.items()}
                found.append(Forecast(hosts, tokens, share, alone, paired))
    return found


def forecast_table(forecasts: Sequence[Forecast]) -> list[str]:
    """As Markdown."""
    lines = [
        "## 64 and 512 hosts, predicted: 1-D / this, and 2-D / this, both in pairs",
        "",
        "| hosts | tokens | 1-D communicates | scheme | pairs / one by one | 1-D / this | 2-D / this |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in forecasts:
        for name, seconds in one.paired.items():
            to_two_d = f"{one.paired[TWO_D] / seconds:.2f}" if TWO_D in one.paired else ""
            cells = (one.hosts, one.tokens, f"{one.share:.0%}", name, f"{seconds / one.alone[name]:.2f}",
                     f"{one.paired[ONE_D[0]] / seconds:.2f}", to_two_d)  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


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
