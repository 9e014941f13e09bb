"""Saves timelines as images: PNG, SVG or PDF. A long timeline is broken into bands, like lines of text.

title: makespan, bubble
rank 0 | 0 1 2 3 ...                band 0
rank 1 |   0 1 2 ...
rank 0 | ... 6 6 7 7                band 1: continues
rank 1 | ...  6 6 7
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hanayo.errors import HanayoError, writing
from lightning_hanayo.plotting.palette import box_lengths, legend_entries
from lightning_hanayo.plotting.timeline_axes import draw_actions, draw_activations, summary, time_label
from lightning_hanayo.schedule import CostModel, Schedule, Timeline, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")

DPI = 160
_ABOVE, _BELOW, _BETWEEN = 0.3, 0.3, 0.25
"""inches: above the panels (title), below them (legend), and between two bands"""
_CURVE = 0.16
"""inches of one rank's activations"""
_BOX_WIDTH = 0.13
"""inches, if there is room: a number of two digits fits"""
_MIN_WIDTH, _MAX_WIDTH, _MAX_HEIGHT = 9.0, 20.0, 40.0
"""inches of the image"""
_PAGE_WIDTH = 10.0
"""inches of a comparison: 1600 pixels, so that it can be read at the width of a page"""
_LEFT, _RIGHT = 0.7, 0.2
"""inches left and right of the rows"""
_BETWEEN_ROWS, _TICKS, _LINE = 0.08, 0.35, 0.17
"""inches: between the two timelines of a band, below a band, and of a line of text"""
_MAX_ROWS_HEIGHT = 100.0
"""inches of a band: the rows of more than 333 ranks are lower, as no image has more than 65,536 pixels"""


def save_comparison(
    path: str | Path,
    measured: Timeline,
    simulated: Timeline,
    title: str | None = None,
    unit: str = "s",
    planned: float | None = None,
) -> None:
    """Save the measured timeline above the simulated one, in bands that share a time axis (`wave.png`).

    Call it on one rank only.

    Args:
        path: the file, ending in .png, .svg or .pdf.
        measured: of a real step.
        simulated: with the measured costs, in the same unit of time.
        title: at the top.
        unit: of time.
        planned: the bubble ratio that was predicted before the run.

    Raises:
        HanayoError: the suffix is no image format, or the file can't be written.
    """
    both = {"measured": measured, "simulated": simulated}
    rows = [_rows_height(timeline) for timeline in both.values()]
    band = sum(rows) + _BETWEEN_ROWS + _TICKS
    bands = _bands(list(both.values()), _PAGE_WIDTH, band)
    words = _words(measured, simulated, planned, unit)
    above = _ABOVE * bool(title) + _LINE * len(words) + 0.15
    height = above + len(bands) * band + 0.2 + _BELOW
    with image_file(path, _PAGE_WIDTH, height) as figure:
        top = height - above
        for window in bands:
            for (label, timeline), own in zip(both.items(), rows, strict=True):
                axes = _panel(figure, top, own)
                draw_actions(timeline, axes, window=window)
                axes.set_ylabel(label, fontsize=8)
                axes.spines["bottom"].set_visible(timeline is simulated)
                axes.tick_params(axis="x", labelsize=8, pad=1, length=0 if timeline is measured else 3)
                axes.tick_params(axis="x", labelbottom=timeline is simulated)
                top -= own + _BETWEEN_ROWS
            top -= _TICKS - _BETWEEN_ROWS
        figure.text(0.5, 0.3 / height, time_label(unit), ha="center", fontsize=9)
        _draw_legend(figure, list(both.values()))
        if title:
            figure.text(_LEFT / _PAGE_WIDTH, 1 - 0.08 / height, title, va="top", fontsize=11, weight="bold")
        for number, line in enumerate(words):
            y = height - _ABOVE * bool(title) - 0.08 - _LINE * number
            figure.text(_LEFT / _PAGE_WIDTH, y / height, line, va="top", fontsize=8.5)


def _words(measured: Timeline, simulated: Timeline, planned: float | None, unit: str) -> list[str]:
    """What the bubbles of a comparison are, and why they differ."""
    lines = [
        f"{summary(measured, unit, 'measured')}: as it ran, with all waiting and the hosts' work between actions",
        f"{summary(simulated, unit, 'simulated')}: the same order, with the measured times of stages and messages",
    ]
    if planned is not None:
        lines.append(f"planned: bubble {planned:.1%}, for the costs that the order was chosen for, before the run")
    return [*lines, "bubble: the share of all ranks' time in which they don't compute"]


def save_schedule(path: str | Path, schedule: Schedule, costs: CostModel | None = None, unit: str = "") -> None:
    """Save the simulated timeline of `schedule` with the given `costs` (default T_F = 1, T_B = 2, messages free).

    Raises:
        HanayoError: the suffix is no image format, or the file can't be written.
    """
    name = f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_microbatches} micro-batches"
    save_timeline(path, simulate(schedule, costs), title=name, unit=unit)


def save_timeline(
    path: str | Path,
    timeline: Timeline,
    *,
    title: str | None = None,
    unit: str = "",
    follow: Sequence[int] = (),
    activations: bool = False,
) -> None:
    """Save `timeline`, in as many bands as it takes for numbers to fit into their boxes.

    Args:
        path: the file, ending in .png, .svg or .pdf.
        timeline: simulated or measured.
        title: written before makespan and bubble ratio.
        unit: of time, e.g. `"s"`.
        follow: micro-batches whose path over the ranks is drawn as a line.
        activations: whether to draw each rank's activations below, with its peak in M_a.

    Raises:
        HanayoError: the suffix is no image format, or the file can't be written.
    """
    rows = _rows_height(timeline)
    bands = _bands([timeline], _MAX_WIDTH, rows + _BETWEEN)
    width = min(_MAX_WIDTH, max(_MIN_WIDTH, 0.9 + _ideal_width(timeline) / len(bands)))
    curves = (_CURVE * timeline.num_ranks + _BETWEEN) * activations
    height = 0.35 + len(bands) * (rows + _BETWEEN + curves) + 0.2 + _BELOW
    with image_file(path, width, height) as figure:
        for number, band in enumerate(bands):
            top = height - 0.35 - number * (rows + _BETWEEN + curves)
            axes = _panel(figure, top, rows)
            draw_actions(timeline, axes, window=band, follow=follow)
            axes.tick_params(axis="x", labelsize=8, pad=1)
            if activations:
                draw_activations(timeline, _panel(figure, top - rows - _BETWEEN, curves - _BETWEEN), window=band)
        figure.text(_LEFT / width, 1 - 0.1 / height, summary(timeline, unit, title), va="top", fontsize=10)
        figure.text(0.5, 0.3 / height, time_label(unit), ha="center", fontsize=9)
        _draw_legend(figure, [timeline])


def _panel(figure: "Figure", top: float, height: float) -> "Axes":
    """Axes across the image, whose top and height are given in inches."""
    width, figure_height = figure.get_size_inches()
    inside = width - _LEFT - _RIGHT
    return figure.add_axes((_LEFT / width, (top - height) / figure_height, inside / width, height / figure_height))


def _bands(timelines: Sequence[Timeline], width: float, height: float) -> list[tuple[float, float]]:
    """Begin and end of each band: as many as it takes for numbers to fit into this width, within the maximum height."""
    max_bands = max(1, int(_MAX_HEIGHT / height))
    num_bands = min(max_bands, max(1, ceil(max(map(_ideal_width, timelines)) / (width - _LEFT - _RIGHT))))
    length = (max(timeline.makespan for timeline in timelines) or 1.0) / num_bands
    return [(number * length, (number + 1) * length) for number in range(num_bands)]


def _ideal_width(timeline: Timeline) -> float:
    """The width in inches at which a number fits into all compute boxes but the shortest tenth."""
    lengths = box_lengths(timeline)
    narrowest = lengths[len(lengths) // 10] if lengths else 1.0
    return _BOX_WIDTH * (timeline.makespan or 1.0) / narrowest


def _rows_height(timeline: Timeline) -> float:
    return min(_MAX_ROWS_HEIGHT, max(0.3, 0.5 - 0.01 * timeline.num_ranks) * timeline.num_ranks)


@contextmanager
def image_file(path: str | Path, width: float, height: float) -> Iterator["Figure"]:
    """Give an empty figure of this size in inches to draw on, then save it.

    It uses no pyplot, so it has no global state and needs no window system.

    Raises:
        HanayoError: the suffix isn't one of `FORMATS`, or the file can't be written.
    """
    if Path(path).suffix[1:].lower() not in FORMATS:
        raise HanayoError(f"{path} is no image: its suffix must be one of {', '.join(FORMATS)}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(figure)
    yield figure
    with writing(path):
        figure.savefig(path)


def _draw_legend(figure: "Figure", timelines: Sequence[Timeline]) -> None:
    """Explain the colours, at the bottom."""
    from matplotlib.patches import Patch

    entries = legend_entries(timelines)
    handles = [Patch(facecolor=colour, label=label) for label, colour in entries.items()]
    needed = sum(0.3 + 0.062 * len(label) for label in entries)  # inches at 8 points
    size = 8 * min(1.0, figure.get_size_inches()[0] / max(1.0, needed))
    look: Any = {"frameon": False, "fontsize": size, "columnspacing": 1.0, "handlelength": 1.2, "handletextpad": 0.4}
    figure.legend(handles=handles, loc="lower center", ncols=max(1, len(handles)), **look)
