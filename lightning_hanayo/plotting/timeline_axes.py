"""Draws a timeline on matplotlib axes, one row per rank: its actions, or the activations that it holds.

rank 0 | 0 1 2 3 .  0 0  1 1 ...
rank 1 |   0 1 2 .  .  ...
         time ->                  a box per action, with its micro-batch if that fits; idle time shows the background;
                                  while a rank has two actions at once, each has half of the row's height

rank 0 |    ___/~~~~\\___         from zero to the largest peak of all ranks
rank 1 |  ____/~~~\\_____
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_hanayo.plotting import palette
from lightning_hanayo.plotting.lanes import Part, Parts, main_part, outline, span_parts
from lightning_hanayo.schedule import Kind, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BOX_HEIGHT = 0.86
"""as a fraction of the row"""

_THIN_TOP = 1 - 0.18 / BOX_HEIGHT
"""of the boxes of gradient reductions, which are drawn at the bottom of a row, over the computation"""

SMALLEST_FONT = 2.8
"""points; a number that would have to be smaller is left out"""


def draw_timeline(
    timeline: Timeline,
    axes: "Axes",
    *,
    title: str | None = None,
    unit: str = "",
    until: float | None = None,
    follow: Sequence[int] = (),
) -> None:
    """Draw `timeline` on `axes`. Time zero is its first start.

    Args:
        timeline: simulated or measured.
        axes: where to draw.
        title: written before makespan and bubble ratio, which are always shown.
        unit: of time, e.g. `"s"`.
        until: the right end of the time axis, to draw two timelines to one scale; None: the makespan.
        follow: micro-batches whose path over the ranks is drawn as a line.
    """
    until = until or timeline.makespan or 1.0
    draw_actions(timeline, axes, window=(0.0, until), follow=follow)
    axes.set_xlabel(time_label(unit))
    axes.set_title(summary(timeline, unit, title), loc="left", fontsize=10)


def draw_actions(
    timeline: Timeline, axes: "Axes", *, window: tuple[float, float], follow: Sequence[int] = (), numbers: bool = True
) -> None:
    """Draw the actions between the two times of `window`, counted from the timeline's first start. No title."""
    first, last = window
    begin, legs = timeline.begin, palette.wave_legs(timeline)
    drawn = palette.drawn_spans(timeline)
    boxes = span_parts(span for span in drawn if span.action.kind.is_compute)
    spans = [span for span in drawn if span.end > begin + first and span.start < begin + last]
    _draw_background(timeline, axes, window)
    _draw_boxes(spans, boxes, begin, axes, legs)
    if numbers:
        _draw_numbers(spans, boxes, timeline, axes, legs)
    for step in timeline.steps if follow else ():
        for microbatch in follow:
            _draw_path(axes, step.spans, boxes, begin, microbatch)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_activations(timeline: Timeline, axes: "Axes", *, window: tuple[float, float]) -> None:
    """Draw each rank's activations between the two times of `window`, counted from the timeline's first start."""
    peaks = timeline.peak_activations
    scale = BOX_HEIGHT / (max(peaks, default=0.0) or 1.0)
    _draw_background(timeline, axes, window)
    for rank in range(timeline.num_ranks):
        curve = timeline.activations(rank)
        bottom = rank + BOX_HEIGHT / 2
        times = [time - timeline.begin for time, _ in curve] + [timeline.makespan]
        tops = [bottom - scale * held for _, held in curve]
        look: Any = {"color": palette.ACTIVATION_COLOUR, "linewidth": 0, "zorder": 2}
        axes.fill_between(times, bottom, [*tops, tops[-1]], step="post", **look)
    axes.set_yticks(range(timeline.num_ranks), [f"{peak:.3g} M_a" for peak in peaks], fontsize=7)
    axes.tick_params(axis="both", length=0, labelbottom=False)
    axes.spines[:].set_visible(False)


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
    spans: Sequence[Span], boxes: Mapping[Span, Parts], begin: float, axes: "Axes", legs: palette.WaveLegs
) -> None:
    """Draw all boxes of one row and colour at once: drawing thousands of single boxes would take seconds."""
    from matplotlib.collections import PolyCollection

    shapes: dict[tuple[int, str, bool], list[Parts]] = defaultdict(list)
    for span in spans:
        key = span.rank, palette.action_colour(span.action, legs), span.action.kind.is_compute
        shapes[key].append(boxes.get(span, (Part(span.start, span.end, _THIN_TOP, 1.0),)))
    for (rank, colour, is_compute), own in shapes.items():
        narrowest = min(parts[-1].end - parts[0].start for parts in own)
        line = min(0.6, 0.1 * _points(axes, narrowest))
        corners = [[(time - begin, _row_y(rank, height)) for time, height in outline(parts)] for parts in own]
        look: Any = {"facecolor": colour, "edgecolor": "white", "linewidth": line, "zorder": 2 if is_compute else 3}
        axes.add_collection(PolyCollection(corners, **look), autolim=False)


def _middle(span: Span, boxes: Mapping[Span, Parts], begin: float) -> tuple[float, float]:
    """Time and vertical coordinate of the middle of a box, or of its longest part."""
    time, height = main_part(boxes[span]).middle if span in boxes else ((span.start + span.end) / 2, 0.5)
    return time - begin, _row_y(span.rank, height)


def _row_y(rank: int, height: float) -> float:
    """The vertical coordinate of a height in a rank's row, which is a fraction from the row's top."""
    return rank + BOX_HEIGHT * (height - 0.5)


def _draw_numbers(
    spans: Sequence[Span], boxes: Mapping[Span, Parts], timeline: Timeline, axes: "Axes", legs: palette.WaveLegs
) -> None:
    """Draw all numbers of the same text, size and colour at once, for the same reason."""
    shown = [span for span in spans if span.action.kind.is_compute]
    num_digits = max((len(str(span.action.microbatch)) for span in shown), default=1)
    row_height = float(axes.bbox.height * 72 / axes.figure.dpi / timeline.num_ranks) if shown else 0.0
    places: dict[tuple[str, float, str], list[tuple[float, float]]] = defaultdict(list)
    first, last = axes.get_xlim()
    for span in shown:
        part = main_part(boxes[span])
        widest = _points(axes, part.end - part.start) / (0.68 * num_digits)
        height = BOX_HEIGHT * row_height * (part.bottom - part.top)
        size = round(min(9.0, (0.55 if part.is_whole else 0.7) * height, widest), 1)
        middle = _middle(span, boxes, timeline.begin)
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


def _draw_path(axes: "Axes", spans: Sequence[Span], boxes: Mapping[Span, Parts], begin: float, microbatch: int) -> None:
    """Draw a line through the middles of one micro-batch's forwards and backwards."""
    kinds = (Kind.F, Kind.B, Kind.I)
    path = [span for span in spans if span.action.microbatch == microbatch and span.action.kind in kinds]
    path.sort(key=lambda span: (span.start, span.end))
    middles = [_middle(span, boxes, begin) for span in path]
    times, heights = [time for time, _ in middles], [height for _, height in middles]
    axes.plot(times, heights, color=palette.DARK, linewidth=1.1, alpha=0.7, zorder=5)


def _points(axes: "Axes", length: float) -> float:
    """The width of `length` on the time axis, in points (1/72 inch)."""
    first, last = axes.get_xlim()
    return float(length / (last - first) * axes.bbox.width * 72 / axes.figure.dpi)
