"""The tables and the picture: steps as multiples of the longer one of compute and link."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from recipes.benchmarks.cluster import Link
from recipes.benchmarks.pairs.rank import Plan, Record, Run
from recipes.benchmarks.tensor3d_result import predict


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


def outcome_of(plan: Plan, link: Link, records: Sequence[Record]) -> Outcome:
    """Put the hosts' records together: a step ends when its last host does."""
    found = []
    for place, run in enumerate(plan.runs):
        steps = {
            count: median(max(record.steps[place][count][turn] for record in records) for turn in range(plan.rounds))
            for count in plan.microbatches
        }
        bound = predict(plan.case, run.scheme, link)[0].bound
        found.append(Result(run.scheme, run.way, run.queue, bound, steps, records[0].predicted[place]))
    return Outcome(plan.case.title, plan.case.hidden, tuple(found))


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


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw what a further micro-batch adds, one by one and in pairs, for each scheme."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2 * len(outcomes)), layout="constrained")
    panels = figure.subplots(len(outcomes), squeeze=False)[:, 0]
    for panel, outcome in zip(panels, outcomes, strict=True):
        rows = list(outcome.results)[::-1]
        colors = ["tab:gray" if one.way == rows[-1].way else "tab:green" for one in rows]
        bars = panel.barh(range(len(rows)), [one.steady for one in rows], color=colors)
        panel.bar_label(bars, [f"{one.steady:.2f}" for one in rows], padding=3)
        names = [f"{one.scheme}, {one.way}" + ("" if one.queue else ", all at once") for one in rows]
        panel.set_yticks(range(len(rows)), names)
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_title(f"{outcome.title}: what a further micro-batch adds / max(compute, link)")
        panel.margins(x=0.1)
    figure.savefig(path, dpi=120)
