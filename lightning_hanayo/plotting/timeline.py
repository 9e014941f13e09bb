"""Saves timelines as images: PNG, SVG or PDF. A long timeline is broken into bands, like lines of text.

title: makespan, bubble
rank 0 | 0 1 2 3 ...                band 0
rank 1 |   0 1 2 ...
rank 0 | ... 6 6 7 7                band 1: continues
rank 1 | ...  6 6 7

Draws a timeline on matplotlib axes, one row per rank.

rank 0 | 0 1 2 3 .  0 0  1 1 ...
rank 1 |   0 1 2 .  .  ...
         time ->                  a box per action, with its micro-batch if that fits; idle time shows the background;
                                  actions that a rank runs at once have half of the row's height

Finds the messages between ranks, and the idle time before each action, in a timeline.

Shares a rank's row among spans that overlap in time: each has a lane, as long as it runs.

0F3 from 0 to 1, 2B1 from 0 to 2         rank 0 |0F3 |    |
                                                |2B1      |

Writes timelines in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open.

process "hanayo"          thread "rank 0"  |0F0|0F1|...           a slice per action; arrows are messages
                          thread "rank 1"      |1F0|...
                          thread "rank 1, at the same time"       the second action of a pair
                          counter "activations, rank 0"           in M_a, a step function
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hanayo.errors import HanayoError, writing
from lightning_hanayo.plotting import palette
from lightning_hanayo.plotting.palette import KIND_NAMES, legend_entries
from lightning_hanayo.schedule import Kind, Span, Timeline
from lightning_hanayo.schedule.table import waits_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FORMATS = ("png", "svg", "pdf")

DPI = 160
_ABOVE, _BELOW, _BETWEEN = 0.3, 0.3, 0.25
"""inches: above the panels (title), below them (legend), and between two bands"""
_BOX_WIDTH = 0.13
"""inches, if there is room: a number of two digits fits"""
_MIN_WIDTH, _MAX_WIDTH, _MAX_HEIGHT = 9.0, 20.0, 40.0
"""inches of the image"""
_PAGE_WIDTH = 10.0
"""inches of several timelines: 1600 pixels, so that it can be read at the width of a page"""
_LEFT, _RIGHT = 0.7, 0.2
"""inches left and right of the rows"""
_LABEL, _TICKS, _LINE = 0.2, 0.27, 0.17
"""inches: of a panel's label above it, below a band, and of a line of text"""
_FULL_PANELS = 3
"""panels of a band with rows of full height; more are as high as so many together"""
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
    words = _words(measured, simulated, planned, unit)
    save_panels(path, {"measured": measured, "simulated": simulated}, title=title, words=words, unit=unit)


def save_panels(
    path: str | Path, timelines: Mapping[str, Timeline], *, title: str | None, words: Sequence[str], unit: str
) -> None:
    """Save several timelines, one above the other, in bands that share a time axis.

    Args:
        path: the file, ending in .png, .svg or .pdf.
        timelines: by the label of their panel.
        title: at the top.
        words: lines of text below it.
        unit: of time.

    Raises:
        HanayoError: the suffix is no image format, or the file can't be written.
    """
    share = min(1.0, _FULL_PANELS / len(timelines))
    rows = [share * _rows_height(timeline) for timeline in timelines.values()]
    band = sum(rows) + len(rows) * _LABEL + _TICKS
    bands = _bands(list(timelines.values()), _PAGE_WIDTH, band)
    above = _ABOVE * bool(title) + _LINE * len(words) + 0.15
    height = above + len(bands) * band + 0.2 + _BELOW
    with image_file(path, _PAGE_WIDTH, height) as figure:
        top = height - above
        for window in bands:
            for (label, timeline), own in zip(timelines.items(), rows, strict=True):
                axes = _panel(figure, top - _LABEL, own)
                draw_actions(timeline, axes, window=window)
                axes.set_title(label, loc="left", fontsize=8, pad=2)
                axes.tick_params(axis="y", labelleft=share == 1.0)
                axes.tick_params(axis="x", labelsize=8, pad=1, length=0, labelbottom=False)
                axes.spines["bottom"].set_visible(False)
                top -= own + _LABEL
            axes.tick_params(axis="x", length=3, labelbottom=True)
            axes.spines["bottom"].set_visible(True)
            top -= _TICKS
        figure.text(0.5, 0.3 / height, time_label(unit), ha="center", fontsize=9)
        _draw_legend(figure, list(timelines.values()))
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


def save_timeline(
    path: str | Path,
    timeline: Timeline,
    *,
    title: str | None = None,
    unit: str = "",
    follow: Sequence[int] = (),
) -> None:
    """Save `timeline`, in as many bands as it takes for numbers to fit into their boxes.

    Args:
        path: the file, ending in .png, .svg or .pdf.
        timeline: simulated or measured.
        title: written before makespan and bubble ratio.
        unit: of time, e.g. `"s"`.
        follow: micro-batches whose path over the ranks is drawn as a line.

    Raises:
        HanayoError: the suffix is no image format, or the file can't be written.
    """
    rows = _rows_height(timeline)
    bands = _bands([timeline], _MAX_WIDTH, rows + _BETWEEN)
    width = min(_MAX_WIDTH, max(_MIN_WIDTH, 0.9 + _ideal_width(timeline) / len(bands)))
    height = 0.35 + len(bands) * (rows + _BETWEEN) + 0.2 + _BELOW
    with image_file(path, width, height) as figure:
        for number, band in enumerate(bands):
            axes = _panel(figure, height - 0.35 - number * (rows + _BETWEEN), rows)
            draw_actions(timeline, axes, window=band, follow=follow)
            axes.tick_params(axis="x", labelsize=8, pad=1)
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
    compute = (span for span in palette.drawn_spans(timeline) if span.action.kind.is_compute)
    lengths = sorted(span.end - span.start for span in compute)
    # a few short actions, such as those of a small last stage, shouldn't widen the image
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


def timeline_messages(timeline: Timeline) -> Iterator[tuple[Span, Span]]:
    """The messages of all steps: what computes a tensor, and what waits for it on another rank."""
    for step in timeline.steps:
        span_of = {span.action: span for span in step.spans if span.action.kind.is_compute}
        num_stages = 1 + max((action.stage for action in span_of), default=0)
        waits = waits_in([list(span_of)], num_stages)
        for action, span in span_of.items():
            for other in waits[action]:
                if span_of[other].rank != span.rank:
                    yield span_of[other], span


def idle_before(timeline: Timeline) -> dict[Span, float]:
    """For each compute span: how long its rank had been idle when it started."""
    idle: dict[Span, float] = {}
    free_since = [timeline.begin] * timeline.num_ranks
    for span in sorted(timeline.spans, key=lambda span: (span.start, span.end)):
        if span.action.kind.is_compute:
            idle[span] = max(0.0, span.start - free_since[span.rank])
            free_since[span.rank] = max(free_since[span.rank], span.end)
    return idle


def span_lanes(spans: Iterable[Span]) -> dict[Span, int]:
    """For each span a lane, from 0 on, in which it overlaps with no other span of its rank: the first one free."""
    lanes: dict[Span, int] = {}
    ends: dict[int, list[float]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        own = ends.setdefault(span.rank, [])
        lane = next((lane for lane, end in enumerate(own) if end <= span.start), len(own))
        own[lane : lane + 1] = [span.end]
        lanes[span] = lane
    return lanes


Height = tuple[float, float]
"""top and bottom of a box, as fractions of the row from its top"""
WHOLE: Height = (0.0, 1.0)


def box_heights(spans: Iterable[Span]) -> dict[Span, Height]:
    """The whole row for a span that is alone on its rank, its lane for one that overlaps with others."""
    lanes = span_lanes(spans)
    num_lanes = 1 + max(lanes.values(), default=0)
    heights = dict.fromkeys(lanes, WHOLE)
    running: dict[int, list[Span]] = {}
    for span in lanes:  # in order of time
        together = [*(one for one in running.get(span.rank, ()) if one.end > span.start), span]
        running[span.rank] = together
        if len(together) > 1:
            heights |= {one: (lanes[one] / num_lanes, (lanes[one] + 1) / num_lanes) for one in together}
    return heights


BOX_HEIGHT = 0.86
"""as a fraction of the row"""

_THIN: Height = (1 - 0.18 / BOX_HEIGHT, 1.0)
"""of the boxes of gradient reductions, which are drawn at the bottom of a row, over the computation"""

SMALLEST_FONT = 2.8
"""points; a number that would have to be smaller is left out"""


def draw_actions(
    timeline: Timeline, axes: "Axes", *, window: tuple[float, float], follow: Sequence[int] = (), numbers: bool = True
) -> None:
    """Draw the actions between the two times of `window`, counted from the timeline's first start. No title."""
    first, last = window
    begin, legs = timeline.begin, palette.wave_legs(timeline)
    drawn = palette.drawn_spans(timeline)
    heights = box_heights(span for span in drawn if span.action.kind.is_compute)
    spans = [span for span in drawn if span.end > begin + first and span.start < begin + last]
    _draw_background(timeline, axes, window)
    _draw_boxes(spans, heights, begin, axes, legs)
    if numbers:
        _draw_numbers(spans, heights, timeline, axes, legs)
    for step in timeline.steps if follow else ():
        for microbatch in follow:
            _draw_path(axes, step.spans, heights, begin, microbatch)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def summary(timeline: Timeline, unit: str = "", title: str | None = None) -> str:
    """Makespan and bubble ratio, as every image shows them, after the title."""
    makespan = f"makespan {timeline.makespan:.4g} {unit}".rstrip()
    return f"{f'{title}: ' if title else ''}{makespan}, bubble {timeline.bubble_ratio:.1%}"


def time_label(unit: str) -> str:
    """The label of a time axis."""
    return f"time [{unit}]" if unit else "time"


def _draw_background(timeline: Timeline, axes: "Axes", window: tuple[float, float]) -> None:
    first, last = window
    ranks = range(timeline.num_ranks)
    axes.barh(ranks, last - first, left=first, height=BOX_HEIGHT, color=palette.IDLE_COLOUR, zorder=0)
    axes.set_xlim(first, last)
    axes.set_ylim(max(1, timeline.num_ranks) - 0.5, -0.5)


def _draw_boxes(
    spans: Sequence[Span], heights: Mapping[Span, Height], begin: float, axes: "Axes", legs: palette.WaveLegs
) -> None:
    """Draw all boxes of one row and colour at once: drawing thousands of single boxes would take seconds."""
    from matplotlib.collections import PolyCollection

    shapes: dict[tuple[int, str, bool], list[Span]] = defaultdict(list)
    for span in spans:
        shapes[span.rank, palette.action_colour(span.action, legs), span.action.kind.is_compute].append(span)
    for (_, colour, is_compute), own in shapes.items():
        line = min(0.6, 0.1 * _points(axes, min(span.end - span.start for span in own)))
        corners = []
        for span in own:
            left, right = span.start - begin, span.end - begin
            top, bottom = (_row_y(span.rank, height) for height in heights.get(span, _THIN))
            corners.append([(left, top), (right, top), (right, bottom), (left, bottom)])
        look: Any = {"facecolor": colour, "edgecolor": "white", "linewidth": line, "zorder": 2 if is_compute else 3}
        axes.add_collection(PolyCollection(corners, **look), autolim=False)


def _middle(span: Span, heights: Mapping[Span, Height], begin: float) -> tuple[float, float]:
    """Time and vertical coordinate of the middle of a box."""
    return (span.start + span.end) / 2 - begin, _row_y(span.rank, sum(heights.get(span, WHOLE)) / 2)


def _row_y(rank: int, height: float) -> float:
    """The vertical coordinate of a height in a rank's row, which is a fraction from the row's top."""
    return rank + BOX_HEIGHT * (height - 0.5)


def _draw_numbers(
    spans: Sequence[Span], heights: Mapping[Span, Height], timeline: Timeline, axes: "Axes", legs: palette.WaveLegs
) -> None:
    """Draw all numbers of the same text, size and colour at once, for the same reason."""
    shown = [span for span in spans if span.action.kind.is_compute]
    num_digits = max((len(str(span.action.microbatch)) for span in shown), default=1)
    row_height = float(axes.bbox.height * 72 / axes.figure.dpi / timeline.num_ranks) if shown else 0.0
    places: dict[tuple[str, float, str], list[tuple[float, float]]] = defaultdict(list)
    first, last = axes.get_xlim()
    for span in shown:
        widest = _points(axes, span.end - span.start) / (0.68 * num_digits)
        top, bottom = heights[span]
        height = BOX_HEIGHT * row_height * (bottom - top)
        size = round(min(9.0, (0.55 if heights[span] == WHOLE else 0.7) * height, widest), 1)
        middle = _middle(span, heights, timeline.begin)
        if size >= SMALLEST_FONT and first <= middle[0] <= last:
            key = str(span.action.microbatch), size, palette.text_colour(palette.action_colour(span.action, legs))
            places[key].append(middle)
    for (text, size, colour), offsets in places.items():
        _draw_number(axes, text, size, colour, offsets)


def _draw_number(axes: "Axes", text: str, size: float, colour: str, offsets: list[tuple[float, float]]) -> None:
    """Draw the outline of one number at all its places."""
    from matplotlib.collections import PathCollection
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    outline = TextPath((0, 0), text, size=size)
    box = outline.get_extents()
    centred = outline.transformed(Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2))
    numbers = PathCollection([centred], offsets=offsets, offset_transform=axes.transData, facecolor=colour, linewidth=0)
    numbers.set_transform(Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans)  # from points to pixels
    numbers.set(label=text, zorder=4, clip_on=True)
    axes.add_collection(numbers, autolim=False)


def _draw_path(
    axes: "Axes", spans: Sequence[Span], heights: Mapping[Span, Height], begin: float, microbatch: int
) -> None:
    """Draw a line through the middles of one micro-batch's forwards and backwards."""
    kinds = (Kind.F, Kind.B, Kind.I)
    path = [span for span in spans if span.action.microbatch == microbatch and span.action.kind in kinds]
    path.sort(key=lambda span: (span.start, span.end))
    middles = [_middle(span, heights, begin) for span in path]
    times, rows = [time for time, _ in middles], [row for _, row in middles]
    axes.plot(times, rows, color=palette.DARK, linewidth=1.1, alpha=0.7, zorder=5)


def _points(axes: "Axes", length: float) -> float:
    """The width of `length` on the time axis, in points (1/72 inch)."""
    first, last = axes.get_xlim()
    return float(length / (last - first) * axes.bbox.width * 72 / axes.figure.dpi)


Event = dict[str, Any]
Waits = Mapping[str, Sequence[Span]]
"""by the names of the timelines, spans in which a rank waited for the inputs of an action"""


def save_trace(
    path: str | Path, timelines: Mapping[str, Timeline], *, seconds: float = 1e-3, waits: Waits | None = None
) -> None:
    """Write `chrome_trace` to a file.

    Raises:
        HanayoError: the file can't be written.
    """
    text = json.dumps(chrome_trace(timelines, seconds=seconds, waits=waits), separators=(",", ":"))
    with writing(path):
        Path(path).write_text(text, encoding="utf-8")


def chrome_trace(
    timelines: Mapping[str, Timeline], *, seconds: float = 1e-3, waits: Waits | None = None
) -> dict[str, Any]:
    """The trace as a JSON object: one process per timeline, one thread per rank.

    Args:
        timelines: simulated or measured, by name.
        seconds: the length of the timelines' unit of time; 1.0 if they were measured in seconds. By default one unit
            is shown as a millisecond.
        waits: drawn between the actions.

    Example:
        >>> chrome_trace({"gpipe": simulate(build("gpipe", num_ranks=2, num_microbatches=2))})["traceEvents"][0]
        {'ph': 'M', 'pid': 0, 'name': 'process_name', 'args': {'name': 'gpipe'}}
    """
    events: list[Event] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events += _events(process, name, timeline, 1e6 * seconds, (waits or {}).get(name, ()), len(events))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _events(
    process: int, name: str, timeline: Timeline, microseconds: float, waits: Sequence[Span], first_flow: int
) -> Iterator[Event]:
    """The events of one timeline, whose unit of time is `microseconds` long."""
    compute = [span for span in timeline.spans if span.action.kind.is_compute]
    lanes = span_lanes([*waits, *compute])  # slices of one thread must not overlap
    num_lanes, idle = 1 + max(lanes.values(), default=0), idle_before(timeline)

    def length(time: float) -> float:
        return round(time * microseconds, 3)

    def at(time: float) -> Event:
        return {"ts": length(time - timeline.begin)}

    def thread(span: Span) -> Event:
        """The lanes of a rank have the first numbers, its communication has the last one."""
        return {"pid": process, "tid": span.rank * (num_lanes + 1) + lanes.get(span, num_lanes)}

    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    threads = {rank * (num_lanes + 1): f"rank {rank}" for rank in range(timeline.num_ranks)}
    threads |= {thread(span)["tid"]: f"rank {span.rank}, at the same time" for span, lane in lanes.items() if lane}
    others = (span for span in timeline.spans if not span.action.kind.is_compute)
    threads |= {thread(span)["tid"]: f"rank {span.rank}, communication" for span in others}
    for number, label in sorted(threads.items()):
        common: Event = {"ph": "M", "pid": process, "tid": number}
        yield {**common, "name": "thread_name", "args": {"name": label}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": number}}

    def piece(span: Span, text: str, category: str, details: Event) -> Event:
        event = {"ph": "X", **thread(span), "name": text, "cat": category, **at(span.start)}
        return {**event, "dur": length(span.end - span.start), "args": details}

    for span in waits:
        yield piece(span, f"wait {span.action}", "wait", {})
    for span in timeline.spans:
        action = span.action
        details: Event = {"stage": action.stage, "microbatch": action.microbatch}
        if span in idle:
            details["idle_before_us"] = length(idle[span])
        yield piece(span, str(action), KIND_NAMES.get(action.kind, "message"), details)
    for number, (producer, consumer) in enumerate(timeline_messages(timeline), first_flow):
        kind = "activation" if consumer.action.kind is Kind.F else "gradient"
        common = {"cat": "message", "name": kind, "id": number}
        sent = producer.start + 0.999 * (
            producer.end - producer.start
        )  # an arrow's end belongs to the slice at its time
        yield {"ph": "s", **thread(producer), **common, **at(sent)}
        yield {"ph": "f", "bp": "e", **thread(consumer), **common, **at(consumer.start)}
    for rank in range(timeline.num_ranks):
        counter: Event = {"ph": "C", "pid": process, "tid": rank * (num_lanes + 1), "name": f"activations, rank {rank}"}
        for time, held in timeline.activations(rank):
            yield {**counter, **at(time), "args": {"M_a": held}}
