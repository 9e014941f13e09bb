"""Compares idle times in equal memory, which the paper doesn't. F = I = W, messages are free."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hanayo.errors import HanayoError
from recipes.paper import figure
from recipes.paper.contender import BUDGETS, OURS, SPLIT, WHOLE, Contender, Measured, measure
from recipes.paper.page import markdown, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = (4, 8)
"""P"""

LOADS = (1, 2, 4)
"""B / P"""


def measured(contender: Contender, num_ranks: int, load: int) -> Measured | None:
    """The simulated figures, or None if the schedule can't be built with these sizes or within this budget."""
    try:
        return measure(contender, num_ranks, load * num_ranks)
    except HanayoError:
        return None


def table(contenders: tuple[Contender, ...], num_ranks: int) -> str:
    """A row per contender: bubble and peak at each B, and messages."""
    rows = []
    for contender in contenders:
        results = [measured(contender, num_ranks, load) for load in LOADS]
        found = next((result for result in reversed(results) if result is not None), None)
        hops = "" if found is None else str(found.messages)
        rows.append((contender.label, *map(_bubble, results), *map(_peak, results), hops))
    bubbles, peaks = ([f"{what}, B = {_of_p(load)}" for load in LOADS] for what in ("bubble", "peak"))
    return markdown(("schedule", *bubbles, *peaks, "messages"), rows)


def equal_memory_table(num_ranks: int) -> str:
    """The schedules that stay within P M_a at B = 4P, by bubble, then by messages."""
    fitting = []
    for contender in (*WHOLE, *SPLIT, *OURS):
        last = measured(contender, num_ranks, LOADS[-1])
        if last is not None and last.peak <= num_ranks + 1e-9:
            fitting.append((round(last.bubble, 6), last.messages, contender))
    ordered = sorted(fitting, key=lambda one: one[:2])
    return table(tuple(contender for _, _, contender in ordered), num_ranks)


def budgets_table(num_ranks: int) -> str:
    """A row per budget: the bubbles of `hanayo-zb`."""
    rows = []
    for budget in BUDGETS:
        ours = [replace(contender, budget=budget) for contender in OURS]
        cells = [_bubble(measured(contender, num_ranks, load)) for contender in ours for load in LOADS]
        rows.append((f"{budget:g} P", *cells))
    head = [f"W = {contender.num_waves}, B = {_of_p(load)}" for contender in OURS for load in LOADS]
    return markdown(("budget [M_a]", *head), rows)


def _of_p(load: int) -> str:
    return "P" if load == 1 else f"{load}P"


def _bubble(result: Measured | None) -> str:
    return "" if result is None else percent(result.bubble)


def _peak(result: Measured | None) -> str:
    return "" if result is None else f"{result.peak:.4g}"


def draw(path: Path) -> None:
    """Draw bubble over peak activations: a mark per peer, a line for each number of our waves."""
    plot = figure.new(9.5, 6.2)
    panels = plot.subplots(len(SIZES), len(LOADS))
    for row, num_ranks in zip(panels, SIZES, strict=True):
        for axes, load in zip(row, LOADS, strict=True):
            _draw_panel(axes, num_ranks, load)
    handles, labels = panels[0, -1].get_legend_handles_labels()
    plot.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=7.5, frameon=False)
    figure.save(plot, path)


def _draw_panel(axes: "Axes", num_ranks: int, load: int) -> None:
    for contender in (*WHOLE[1:], *SPLIT):
        result = measured(contender, num_ranks, load)
        if result is not None:
            at = [result.peak / num_ranks], [100 * result.bubble]
            axes.plot(*at, **_marker(contender), linestyle="none", label=contender.label)
    for contender, shade in zip(OURS, figure.WAVES, strict=True):
        budgets = [measured(replace(contender, budget=budget), num_ranks, load) for budget in BUDGETS]
        points = sorted((one.peak / num_ranks, 100 * one.bubble) for one in budgets if one is not None)
        axes.plot(*zip(*points, strict=True), ".-", color=shade, linewidth=1.4, zorder=1, label=contender.label)
    axes.axvline(1.0, color=figure.SOFT, linewidth=0.8, linestyle=":", zorder=0)
    figure.plain(
        axes, f"P = {num_ranks}, B = {_of_p(load)}", "peak activations [P M_a]", "bubble [%]" if load == 1 else ""
    )
    axes.set_xlim(0.25, 1.55)
    axes.set_yscale("log")
    axes.set_ylim(0.7, 75)
    axes.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.minorticks_off()


_TICKS = (1, 2, 5, 10, 20, 50)
_COLOURS = {"interleaved": figure.BLUE, "hanayo": figure.ORANGE, "interleaved-zb": figure.BLUE, "zbv": figure.ORANGE}
_COLOURS |= {"v-half": figure.GREEN, "v-min": figure.GREEN, "chimera": figure.VIOLET}
_MARKS = {1: "o", 2: "v", 4: "s", 8: "D"}


def _marker(contender: Contender) -> dict[str, Any]:
    """Its marker: the colour shows the family, the shape the stages per rank; hollow: backward in one piece."""
    stages = contender.num_stages_per_rank or {"hanayo": 2 * contender.num_waves, "1f1b": 1, "zb-h1": 1}.get(
        contender.name, 2
    )
    colour = _COLOURS.get(contender.name, figure.INK)
    filled = "none" if contender in WHOLE else "full"
    small = 4.5 if contender.name == "v-min" else 6
    return {"marker": _MARKS[stages], "color": colour, "fillstyle": filled, "markersize": small}
