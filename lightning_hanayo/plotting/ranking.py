"""Draws the schedules of a comparison in one image, the fastest on top, on one time axis.

hanayo-zb      | small timeline, all ranks       |  activations ===      |  messages ====
bubble 3.0 %   |                                 |                 ¦     |
1f1b           | ...                             |  activations =====    |  messages ==
                 time ->                                     budget
"""

from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from lightning_hanayo.plotting.image import FORMATS, check_suffix, new_figure, save_figure
from lightning_hanayo.plotting.palette import ACTIVATION_COLOUR, DARK, KIND_COLOURS, KIND_NAMES, wave_legs
from lightning_hanayo.plotting.timeline_axes import draw_actions
from lightning_hanayo.schedule.comparison import Candidate, Comparison
from lightning_hanayo.schedule.passes.communication import messages_per_microbatch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _NAME, _BARS, _GAP = 15.0, 1.75, 1.5, 0.3
_ABOVE, _BELOW, _BETWEEN = 0.65, 0.75, 0.16
"""inches"""
_MESSAGE_COLOUR, _GREY = "#a89bb8", "#8a867d"


def save_ranking(
    path: str | Path, comparison: Comparison, *, title: str, budget: float | None = None, unit: str = ""
) -> None:
    """Save the image.

    Args:
        path: the file, ending in .png, .svg or .pdf.
        comparison: at least one candidate.
        title: at the top.
        budget: the activation budget, in M_a, drawn as a line; schedules that exceed it are grey.
        unit: of time.

    Raises:
        HanayoError: the suffix is no image format, or the file can't be written.
    """
    check_suffix(path, FORMATS)
    candidates = comparison.candidates
    row = max(0.42, 0.075 * max(one.timeline.num_ranks for one in candidates))
    below = _BELOW + 0.15 * len(comparison.refused)
    height = _ABOVE + len(candidates) * (row + _BETWEEN) + below
    figure = new_figure(_WIDTH, height)
    figure.text(0.1 / _WIDTH, 1 - 0.1 / height, title, va="top", fontsize=11, weight="bold")
    until = max(one.timeline.makespan for one in candidates)
    for number, one in enumerate(candidates):
        bottom = height - _ABOVE - number * (row + _BETWEEN) - row
        _draw_name(figure, one, bottom + row / 2, height)
        _draw_timeline(
            figure, one, (bottom / height, row / height), until, last=number == len(candidates) - 1, unit=unit
        )
    _draw_bars(figure, candidates, (row, height), budget)
    for number, (name, reason) in enumerate(comparison.refused.items()):
        text = shorten(f"{name} is left out: {reason}", 190)
        figure.text(0.1 / _WIDTH, (0.3 + 0.15 * number) / height, text, fontsize=7, color=_GREY)
    _draw_legend(figure, candidates)
    save_figure(figure, path)


def _draw_legend(figure: "Figure", candidates: tuple[Candidate, ...]) -> None:
    """Without legs, since each candidate has its own."""
    from matplotlib.patches import Patch

    kinds = {span.action.kind for one in candidates for span in one.timeline.spans}
    handles = [
        Patch(facecolor=dark, label=KIND_NAMES[kind]) for kind, (dark, _) in KIND_COLOURS.items() if kind in kinds
    ]
    if any(wave_legs(one.timeline).num_legs > 1 for one in candidates):
        handles.append(Patch(facecolor="none", label="(lighter: odd legs; in chimera, up the ranks)"))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8)


def _draw_name(figure: "Figure", one: Candidate, middle: float, height: float) -> None:
    right, colour = (_NAME - 0.08) / _WIDTH, DARK if one.within_budget else _GREY
    summary = f"{one.timeline.makespan:.4g}, bubble {one.timeline.bubble_ratio:.1%}"
    figure.text(
        right, (middle + 0.02) / height, one.name, ha="right", va="bottom", weight="bold", fontsize=10, color=colour
    )
    figure.text(right, (middle - 0.02) / height, summary, ha="right", va="top", fontsize=8, color=colour)


def _draw_timeline(
    figure: "Figure", one: Candidate, extent: tuple[float, float], until: float, *, last: bool, unit: str
) -> None:
    bottom, height = extent
    width = _WIDTH - _NAME - 2 * (_BARS + _GAP) - 0.15
    axes = figure.add_axes((_NAME / _WIDTH, bottom, width / _WIDTH, height))
    draw_actions(one.timeline, axes, window=(0.0, until), numbers=False)
    axes.axvline(one.timeline.makespan, color=DARK, linewidth=0.8)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelbottom=last, bottom=last, labelsize=8)
    axes.spines["bottom"].set_visible(last)
    if last:
        axes.set_xlabel(f"time [{unit}]" if unit else "time", fontsize=8)


def _draw_bars(
    figure: "Figure", candidates: tuple[Candidate, ...], sizes: tuple[float, float], budget: float | None
) -> None:
    row, height = sizes
    total = len(candidates) * (row + _BETWEEN)
    bottom = (height - _ABOVE - total + _BETWEEN / 2) / height
    columns = (
        ("peak activations [M_a]", [one.peak for one in candidates], ACTIVATION_COLOUR),
        ("messages per micro-batch", [messages_per_microbatch(one.schedule) for one in candidates], _MESSAGE_COLOUR),
    )
    for number, (title, values, colour) in enumerate(columns):
        left = _WIDTH - 0.15 - (2 - number) * _BARS - (1 - number) * _GAP
        axes = figure.add_axes((left / _WIDTH, bottom, _BARS / _WIDTH, total / height))
        _draw_column(axes, title, values, colour)
        if budget is not None and number == 0:
            axes.axvline(budget, color=DARK, linewidth=0.9, linestyle=":")
            axes.text(budget, len(candidates) - 0.48, "budget", ha="center", va="top", fontsize=7)


def _draw_column(axes: "Axes", title: str, values: list[float], colour: str) -> None:
    axes.barh(range(len(values)), values, height=0.5, color=colour)
    largest = max(values) or 1.0
    for row, value in enumerate(values):
        axes.text(value + 0.02 * largest, row, f"{value:.4g}", va="center", fontsize=8)
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_xlim(0, 1.25 * largest)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.set_title(title, fontsize=8, loc="left", pad=10)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
