"""Formats outcomes as Markdown and as a picture, right after the measurement or later from their JSON.

python -m recipes.benchmarks.report docs/benchmarks/steps.json --picture docs/benchmarks/steps.png
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hanayo.errors import HanayoError
from recipes.benchmarks.case import Case
from recipes.benchmarks.harness import Findings, new_parser, run
from recipes.benchmarks.result import Outcome, Result
from recipes.paper.figure import BLUE, GREEN, GREY, INK, ORANGE, new, plain, save
from recipes.paper.table import markdown, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

HEAD = ("schedule", "step ms", "min-max", "bubble", "ideal", "to torch's best", "at equal memory", "peak M_a",
        "us/action", "CPU ms")  # fmt: skip

ABOUT = """# Pipelines of emulated stages

Stages sleep for a set time; messages and gradients are real. `torch` is torch's own runtime, `bare` only sleeps and
sends, and `autograd` also computes gradients, in a loop that is written for these stages.
[What the columns mean](README.md#columns)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of figures that `recipes.benchmarks.pipeline` wrote; draw their picture."""
    parser = new_parser("report", __doc__, picture="draw the picture of the command that measured")
    parser.add_argument("figures", type=Path, metavar="FILE.json", help="written by --json of the pipeline benchmark")
    return run(_again, parser.parse_args(arguments))


def _again(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks import real

    try:
        data = json.loads(options.figures.read_text())
        if "real" in data:
            return real.findings(real.RealOutcome.of(data["real"]), data["machine"])
        return findings([Outcome.of(one) for one in data["cases"]], data["machine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HanayoError(
            f"{options.figures}: expected what `--json` of recipes.benchmarks.pipeline writes; {error!r}"
        ) from error


def findings(outcomes: Sequence[Outcome], machine: Sequence[str]) -> Findings:
    """Returns what the command prints and writes."""
    data = {"machine": machine, "cases": [outcome.plain() for outcome in outcomes]}
    return Findings(table(outcomes, machine), data, {"picture": lambda path: draw(outcomes, path)})


def title(case: Case) -> str:
    """Describes the case in one line."""
    times = (case.forward, case.backward_input, case.backward_weight)
    text = f"P={case.num_ranks} B={case.num_microbatches}, F/I/W {'/'.join(f'{1e3 * t:g}' for t in times)} ms"
    size = f"{case.message_bytes / 2**20:g} MB" if case.message_bytes >= 2**20 else f"{case.message_bytes / 1024:g} KB"
    together = f", {case.steps} steps back to back" if case.steps > 1 else ""
    return f"{text}, messages of {size}{together}"


def table(outcomes: Sequence[Outcome], machine: Sequence[str]) -> str:
    """The results as Markdown."""
    parts = [ABOUT, "\n".join(f"- {line}" for line in machine)]
    for outcome in outcomes:
        notes = [f"- `{label}` can't run: {why}" for label, why in outcome.refused.items()]
        about = f"{outcome.num_rounds} rounds; a rank's forward sleeps {outcome.oversleep_us:.0f} us too long."
        if outcome.hop is not None and outcome.case.forward:
            about += f" hanayo-zb is planned for the measured message time, {1e3 * outcome.hop:.2f} ms."
        if outcome.case.per_action:
            about += f" The number of waves is planned with {1e3 * outcome.case.per_action:.2f} ms per action, too."
        parts += [f"## {title(outcome.case)}", about, markdown(HEAD, map(_row, outcome.results)), "\n".join(notes)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _row(result: Result) -> tuple[str, ...]:
    step = result.step
    return (
        result.label,
        f"{1e3 * step.median:.1f}",
        f"{1e3 * step.least:.1f}-{1e3 * step.most:.1f}",
        "-" if result.bubble is None else percent(result.bubble.median),
        "-" if result.ideal_bubble is None else percent(result.ideal_bubble),
        "-" if result.ratio_to_peer is None else f"{result.ratio_to_peer:.3f}",
        "-" if result.ratio_at_equal_memory is None else f"{result.ratio_at_equal_memory:.3f}",
        f"{result.peak_activations:.2f}",
        f"{result.overhead_us:.0f}",
        f"{1e3 * result.cpu:.1f}",
    )


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """A row of bars for each case: bubble measured and ideal, or step time where nothing is computed."""
    longest = max((len(outcome.results) for outcome in outcomes), default=1)
    figure = new(max(7.5, 2.5 + 0.62 * longest), 0.4 + 3.2 * len(outcomes))
    all_axes = figure.subplots(len(outcomes), 1, squeeze=False)[:, 0]
    for axes, outcome in zip(all_axes, outcomes, strict=True):
        plain(axes, title(outcome.case), y="bubble, %" if outcome.case.busy else "microseconds per action")
        for place, result in enumerate(outcome.results):
            _draw_one(axes, place, result)
        axes.margins(y=0.1)  # room for a number above the highest bar
        labels = [one.label.replace(" ", "\n").replace("leaved-", "leaved-\n") for one in outcome.results]
        axes.set_xticks(range(len(labels)), labels, fontsize=7)
    shown = _legend(any(outcome.case.busy for outcome in outcomes))
    figure.legend(handles=shown, fontsize=8, frameon=False, loc="outside upper center", ncols=len(shown))
    save(figure, path)


def _draw_one(axes: "Axes", place: int, result: Result) -> None:
    """Draw a bar to the median, with its number, and a line from the least to the greatest value."""
    value, low, high, ideal = _bar(result)
    axes.bar(place - 0.2, value, width=0.4, color={"ours": BLUE, "torch": GREY}.get(result.runtime, GREEN))
    axes.vlines(place - 0.2, low, high, color=INK, linewidth=1)
    # Half transparent, so that the end of the line stays visible behind the number
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85}
    axes.annotate(f"{value:.0f}" if ideal is None else f"{value:.1f}", (place - 0.2, value), (0, 2), fontsize=7,
                  textcoords="offset points", ha="center", va="bottom", bbox=behind)  # fmt: skip
    if ideal is not None:
        axes.bar(place + 0.2, ideal, width=0.4, color=ORANGE)


def _bar(result: Result) -> tuple[float, float, float, float | None]:
    if result.bubble is not None and result.ideal_bubble is not None:
        shown = (result.bubble.median, result.bubble.least, result.bubble.most, result.ideal_bubble)
        value, low, high, ideal = (100 * part for part in shown)
        return value, low, high, ideal
    per_action = 1e6 / result.actions_per_rank
    step = result.step
    return step.median * per_action, step.least * per_action, step.most * per_action, None


def _legend(has_ideal: bool) -> list["Patch"]:
    from matplotlib.patches import Patch

    shown = {"measured, ours": BLUE, "measured, torch's runtime": GREY, "without a runtime": GREEN}
    return [
        Patch(color=colour, label=label) for label, colour in (shown | ({"ideal": ORANGE} if has_ideal else {})).items()
    ]


if __name__ == "__main__":
    sys.exit(main())
