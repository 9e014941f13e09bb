"""Combines all ranks' records into figures, and formats them, right after the measurement or later from their JSON.

python -m recipes.benchmarks.report docs/benchmarks/steps.json --picture docs/benchmarks/steps.png
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from recipes.benchmarks.case import Candidate, Case
from recipes.benchmarks.emulated import expected
from recipes.benchmarks.harness import Columns, Findings, Summary, ms, new_parser, page, read, run, span, stored, table
from recipes.benchmarks.rounds import Record, Records, step_time
from recipes.paper.figure import BLUE, GREEN, GREY, INK, ORANGE, new, plain, save
from recipes.paper.page import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch


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
        return {name: value for name, value in asdict(self).items() if name != "hop" or value is not None}


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
    return replace(result, ratio_to_peer=_ratio(result, peers), ratio_at_equal_memory=_ratio(result, within))


def _ratio(result: Result, peers: Sequence[Result]) -> float | None:
    return result.step.median / min(peer.step.median for peer in peers) if peers else None


def _or_dash(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


COLUMNS: Columns = (
    ("schedule", lambda one: one.label),
    ("step ms", lambda one: ms(one.step.median)),
    ("min-max", lambda one: span(one.step)),
    ("bubble", lambda one: _or_dash(one.bubble and one.bubble.median, percent)),
    ("ideal", lambda one: _or_dash(one.ideal_bubble, percent)),
    ("to torch's best", lambda one: _or_dash(one.ratio_to_peer, "{:.3f}".format)),
    ("at equal memory", lambda one: _or_dash(one.ratio_at_equal_memory, "{:.3f}".format)),
    ("peak M_a", lambda one: f"{one.peak_activations:.2f}"),
    ("us/action", lambda one: f"{one.overhead_us:.0f}"),
    ("CPU ms", lambda one: ms(one.cpu)),
)
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

    def found(data: Any) -> Findings:
        if "real" in data:
            return real.findings(read(real.RealOutcome, data["real"]), data["machine"])
        return findings([read(Outcome, one) for one in data["cases"]], data["machine"])

    return stored(options.figures, found, "recipes.benchmarks.pipeline")


def findings(outcomes: Sequence[Outcome], machine: Sequence[str]) -> Findings:
    """Returns what the command prints and writes."""
    data = {"machine": machine, "cases": [outcome.plain() for outcome in outcomes]}
    return Findings(text(outcomes, machine), data, {"picture": lambda path: draw(outcomes, path)})


def title(case: Case) -> str:
    """Describes the case in one line."""
    times = (case.forward, case.backward_input, case.backward_weight)
    sizes = f"P={case.num_ranks} B={case.num_microbatches}, F/I/W {'/'.join(f'{1e3 * t:g}' for t in times)} ms"
    size = f"{case.message_bytes / 2**20:g} MB" if case.message_bytes >= 2**20 else f"{case.message_bytes / 1024:g} KB"
    together = f", {case.steps} steps back to back" if case.steps > 1 else ""
    return f"{sizes}, messages of {size}{together}"


def text(outcomes: Sequence[Outcome], machine: Sequence[str]) -> str:
    """The results as Markdown."""
    parts: list[str | Sequence[str]] = [ABOUT, machine]
    for outcome in outcomes:
        about = f"{outcome.num_rounds} rounds; a rank's forward sleeps {outcome.oversleep_us:.0f} us too long."
        if outcome.hop is not None and outcome.case.forward:
            about += f" hanayo-zb is planned for the measured message time, {ms(outcome.hop, 2)} ms."
        if outcome.case.per_action:
            about += f" The number of waves is planned with {ms(outcome.case.per_action, 2)} ms per action, too."
        notes = [f"`{label}` can't run: {why}" for label, why in outcome.refused.items()]
        parts += [f"## {title(outcome.case)}", about, table(COLUMNS, outcome.results), notes]
    return page(*parts)


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
