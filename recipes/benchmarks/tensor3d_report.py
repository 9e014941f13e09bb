"""The report of the tensor-parallel benchmark: tables as Markdown, steps and one trace as pictures."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hanayo.planner.candidates import ranked_meshes
from recipes.benchmarks.cluster import Link
from recipes.benchmarks.schemes.log import Replay
from recipes.benchmarks.schemes.names import ONE_D, TWO_D, three_d
from recipes.benchmarks.tensor3d_rank import Case, Plan, Record, Steps
from recipes.benchmarks.tensor3d_result import Outcome, Result, Transfer, layer_of, predict
from recipes.paper.figure import BLUE, GREEN, GREY, INK, ORANGE, new, plain, save
from recipes.paper.table import markdown, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAR, PAPER = 64, {ONE_D[0]: 2.32, TWO_D: 1.57}
"""the paper's: 3-D over each of them, 64 GPUs"""
SCALING = ("strong", "weak")


@dataclass(frozen=True)
class Forecast:
    """A step that wasn't run. `share`: of its step, without overlap, that 1-D communicates."""

    case: Case
    share: float
    steps: dict[str, Replay]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


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


def table(
    about: Sequence[str], transfers: Sequence[Transfer], outcomes: Sequence[Outcome], far: Sequence[Forecast]
) -> str:
    """All of it."""
    parts = ["\n".join(f"- {line}" for line in about)]
    if transfers:
        parts += ["## Collectives", markdown(COLLECTIVE_HEAD, map(_transfer, transfers))]
    for outcome in outcomes:
        if outcome.case.title not in SCALING:
            parts += [f"## {title(outcome.case)}", markdown(HEAD, map(_row, outcome.results))]
    for kind in SCALING:
        if rows := [row for outcome in outcomes if outcome.case.title == kind for row in _scaling(outcome)]:
            parts += [f"## {kind.capitalize()} scaling", markdown(SCALING_HEAD, rows)]
    about_far = (
        f"In brackets: if nothing overlapped. On {FAR} GPUs the paper measured, for its cube, {PAPER[ONE_D[0]]} over "
        f"1-D and {PAPER[TWO_D]} over 2-D."
    )
    parts += [f"## {FAR} hosts, predicted", about_far, markdown(FAR_HEAD, map(_forecast, far))]
    return "\n\n".join(parts) + "\n"


HEAD = ("scheme", "step ms", "min-max", "forward ms", "predicted ms", "measured / predicted", "compute ms", "link ms",
        "of the longer", "gain over 1-D", "predicted gain", "reached", "MB", "wire / formula")  # fmt: skip
COLLECTIVE_HEAD = ("collective", "hosts", "MB", "ideal ms", "gloo ms", "of ideal", "ours ms", "of ideal")
SCALING_HEAD = ("hosts", "tokens", "scheme", "step ms", "predicted ms", "gain over 1-D", "predicted gain")
FAR_HEAD = ("tokens", "1-D communicates", "cube over 1-D", "best mesh", "over 1-D", "cube over 2-D", "best over 2-D")


def title(case: Case) -> str:
    """The case in a line."""
    ratio = case.tokens / case.hidden
    return (
        f"{case.hosts} hosts, {case.layers} layers of {case.hidden}, {case.tokens} tokens (M = {ratio:g} h), "
        f"{case.flops_per_second / 1e9:.2f} GFLOP/s"
    )


def _transfer(one: Transfer) -> tuple[str, ...]:
    return (one.kind, str(one.hosts), f"{one.megabytes:g}", f"{1e3 * one.ideal:.1f}", f"{1e3 * one.gloo:.1f}",
            f"{one.gloo / one.ideal:.2f}", f"{1e3 * one.ours:.1f}", f"{one.ours / one.ideal:.2f}")  # fmt: skip


def _row(result: Result) -> tuple[str, ...]:
    step, predicted = result.step, result.predicted
    return (
        result.name,
        f"{1e3 * step.median:.0f}",
        f"{1e3 * step.least:.0f}-{1e3 * step.most:.0f}",
        f"{1e3 * result.forward:.0f}",
        f"{1e3 * predicted.step:.0f}",
        f"{step.median / predicted.step:.3f}",
        f"{1e3 * predicted.computing:.0f}",
        f"{1e3 * predicted.receiving:.0f}",
        f"{step.median / predicted.bound:.2f}",
        _times(result.gain),
        _times(result.predicted_gain),
        percent(result.gain / result.predicted_gain, 0) if result.gain and result.predicted_gain else "-",
        f"{result.volume / 1e6:.2f}" + ("" if result.moved == result.volume else f" (moved {result.moved / 1e6:.2f})"),
        f"{result.on_the_wire / result.volume:.4f}" if result.volume else "-",
    )


def _times(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.2f}"


def _scaling(outcome: Outcome) -> list[tuple[str, ...]]:
    case = outcome.case
    return [
        (str(case.hosts), str(case.tokens), result.name, f"{1e3 * result.step.median:.0f}",
         f"{1e3 * result.predicted.step:.0f}", _times(result.gain), _times(result.predicted_gain))
        for result in outcome.results
    ]  # fmt: skip


def _forecast(one: Forecast) -> tuple[str, ...]:
    first, square, cube, best = one.case.schemes

    def over(slow: str, quick: str) -> str:
        a, b = one.steps[slow], one.steps[quick]
        return f"{a.step / b.step:.2f} ({a.apart / b.apart:.2f})"

    return (
        f"{one.case.tokens} (M = {one.case.tokens // one.case.hidden} h)",
        percent(one.share, 0),
        over(first, cube),
        best,
        over(first, best),
        over(square, cube),
        over(square, best),
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
