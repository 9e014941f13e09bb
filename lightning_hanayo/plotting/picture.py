"""Picture: timelines saved as a file, PNG or SVG by its suffix."""

from collections.abc import Sequence
from pathlib import Path

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting.rows import draw_timeline, legend
from lightning_hanayo.schedule import CostModel, Schedule, Timeline, simulate

_FORMATS = ("png", "svg", "pdf")


def save_comparison(
    path: str | Path, measured: Timeline, predicted: Timeline, title: str | None = None, unit: str = "s"
) -> None:
    """`wave.png`: the pipeline as it ran above the pipeline as predicted, on one time axis.

    Call it on one rank, the one that holds both timelines.

    Args:
        path: the file, ending in .png, .svg or .pdf.
        measured: spans of a real step.
        predicted: what the simulation says under the costs measured, in the same unit of time.
        title: above both.
        unit: the unit of time of both.

    Raises:
        HanayoError: the suffix names no picture format.
    """
    _save(path, [("measured", measured), ("predicted", predicted)], title, unit)


def save_schedule(path: str | Path, schedule: Schedule, costs: CostModel | None = None, unit: str = "") -> None:
    """One picture of `schedule` as it would run under `costs` (default T_F = 1, T_B = 2, messages free).

    Raises:
        HanayoError: the suffix names no picture format.
    """
    name = f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_microbatches} micro-batches"
    _save(path, [(name, simulate(schedule, costs))], None, unit)


def _save(path: str | Path, timelines: Sequence[tuple[str, Timeline]], title: str | None, unit: str) -> None:
    path = Path(path)
    if path.suffix[1:].lower() not in _FORMATS:
        raise HanayoError(f"{path} names no picture: its suffix must be one of {', '.join(_FORMATS)}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = [timeline for _, timeline in timelines]
    until = max(timeline.makespan for timeline in drawn)
    # A figure of its own: no pyplot, so nothing global and no window system.
    figure = Figure(figsize=(_width(drawn), _ABOVE + sum(map(_panel_height, drawn)) + _BELOW), dpi=160)
    FigureCanvasAgg(figure)
    width, height = figure.get_size_inches()
    top = height - _ABOVE * bool(title)
    for label, timeline in timelines:
        rows = _panel_height(timeline) - _AROUND_ROWS
        bottom = top - 0.35 - rows
        axes = figure.add_axes((0.7 / width, bottom / height, (width - 0.9) / width, rows / height))
        draw_timeline(timeline, axes, title=label, unit=unit, until=until)
        top -= _panel_height(timeline)
    entries = legend(drawn)
    handles = [Patch(facecolor=colour, label=name) for name, colour in entries.items()]
    figure.legend(handles=handles, loc="lower center", ncols=max(1, len(handles)), frameon=False, fontsize=8)
    if title:
        figure.text(0.1 / width, 1 - 0.08 / height, title, va="top", fontsize=11, weight="bold")
    figure.savefig(path)


_ABOVE, _BELOW, _AROUND_ROWS = 0.3, 0.3, 0.9
"""inches: over the panels (the title), under them (the legend), around one panel's rows (its title and time axis)"""


def _panel_height(timeline: Timeline) -> float:
    return _AROUND_ROWS + max(0.3, 0.5 - 0.01 * timeline.num_ranks) * timeline.num_ranks


def _width(timelines: Sequence[Timeline]) -> float:
    """Inches: so wide that a number fits the narrowest usual box, within reason."""
    shortest = min(min(_usual(timeline), default=1.0) / (timeline.makespan or 1.0) for timeline in timelines)
    return min(28.0, max(9.0, 0.9 + 0.12 / shortest))


def _usual(timeline: Timeline) -> list[float]:
    """The lengths of the compute boxes without the shortest tenth, whose numbers may be left out."""
    lengths = sorted(
        span.end - span.start for span in timeline.spans if span.action.kind.is_compute and span.end > span.start
    )
    return lengths[len(lengths) // 10 :]
