"""Rows: a timeline drawn on a matplotlib axes, one row per pipeline rank, rank 0 on top.

rank 0 | 0 1 2 3 .  0 0  1 1 ...
rank 1 |   0 1 2 .  .  ...
         time ->                  a box per action, its micro-batch inside where it fits; idle shows the ground
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_hanayo.plotting.legs import Legs, legs
from lightning_hanayo.plotting.palette import DARK, IDLE, colour, ink, name
from lightning_hanayo.schedule import Kind, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 0.86
"""of a box, of the 1 that a row has"""

SMALLEST = 2.8
"""points; a number that would have to be smaller is left out"""

_ORDER = list(Kind)


def draw_timeline(
    timeline: Timeline,
    axes: "Axes",
    *,
    title: str | None = None,
    unit: str = "",
    until: float | None = None,
    follow: Sequence[int] = (),
) -> None:
    """Draw `timeline` on `axes`, times counted from its first start.

    Args:
        timeline: simulated or measured.
        axes: where to draw.
        title: stands before makespan and bubble ratio, which every picture shows.
        unit: of time, e.g. `"s"`.
        until: the right end of the time axis, to draw two timelines to one scale; None: the makespan.
        follow: micro-batches whose way over the ranks is drawn as a line.
    """
    until = until or timeline.makespan or 1.0
    draw_rows(timeline, axes, window=(0.0, until), follow=follow)
    axes.set_xlabel(f"time [{unit}]" if unit else "time")
    text = facts(timeline, unit)
    axes.set_title(f"{title}: {text}" if title else text, loc="left", fontsize=10)


def draw_rows(
    timeline: Timeline,
    axes: "Axes",
    *,
    window: tuple[float, float],
    follow: Sequence[int] = (),
    numbers: bool = True,
) -> None:
    """The rows from `window`'s begin to its end, counted from the timeline's first start, without title."""
    first, last = window
    begin = timeline.begin
    spans = [span for span in timeline.spans if span.end > begin + first and span.start < begin + last]
    for rank in range(timeline.num_ranks):
        axes.barh(rank, last - first, left=first, height=HEIGHT, color=IDLE, zorder=0)
    axes.set_xlim(first, last)
    axes.set_ylim(max(1, timeline.num_ranks) - 0.5, -0.5)
    shading = legs(timeline)
    _draw_boxes(spans, begin, axes, shading)
    if numbers:
        _draw_numbers(spans, begin, axes, shading, timeline.num_ranks)
    for step in timeline.steps if follow else ():
        for microbatch in follow:
            _draw_way(axes, step.spans, begin, microbatch)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_boxes(spans: Sequence[Span], begin: float, axes: "Axes", shading: Legs) -> None:
    """One collection per row and colour: thousands of single boxes would take seconds."""
    boxes: dict[tuple[int, str, bool], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        if span.end > span.start and not span.action.kind.is_message:
            key = span.rank, colour(span.action, shading), span.action.kind.is_compute
            boxes[key].append((span.start - begin, span.end - span.start))
    for (rank, shade, compute), places in boxes.items():
        narrowest = min(length for _, length in places)
        axes.broken_barh(
            places,
            (rank - HEIGHT / 2, HEIGHT) if compute else (rank + HEIGHT / 2 - 0.18, 0.18),
            facecolor=shade,
            edgecolor="white",
            linewidth=min(0.6, 0.1 * _points(axes, narrowest)),
            zorder=2 if compute else 3,
        )


def _draw_numbers(spans: Sequence[Span], begin: float, axes: "Axes", shading: Legs, num_rows: int) -> None:
    """One collection per number, size and ink, for the same reason: its outline, wherever it stands."""
    shown = [span for span in spans if span.end > span.start and span.action.kind.is_compute]
    longest = max((len(str(span.action.microbatch)) for span in shown), default=1)
    places: dict[tuple[str, float, str], list[tuple[float, float]]] = defaultdict(list)
    first, last = axes.get_xlim()
    for span in shown:
        fits = _points(axes, span.end - span.start) / (0.68 * longest)
        size = round(min(9.0, 0.55 * HEIGHT * _row_points(axes, num_rows), fits), 1)
        middle = (span.start + span.end) / 2 - begin
        if size >= SMALLEST and first <= middle <= last:
            key = str(span.action.microbatch), size, ink(colour(span.action, shading))
            places[key].append((middle, float(span.rank)))
    for (text, size, shade), offsets in places.items():
        _draw_number(axes, text, size, shade, offsets)


def _draw_number(axes: "Axes", text: str, size: float, shade: str, offsets: list[tuple[float, float]]) -> None:
    from matplotlib.collections import PathCollection
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    outline = TextPath((0, 0), text, size=size)
    box = outline.get_extents()
    middle = Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2)
    points_to_pixels = Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans
    numbers = PathCollection(
        [outline.transformed(middle)], facecolor=shade, linewidth=0, offsets=offsets, offset_transform=axes.transData
    )
    numbers.set_transform(points_to_pixels)
    numbers.set(label=text, zorder=4, clip_on=True)
    axes.add_collection(numbers, autolim=False)


def _draw_way(axes: "Axes", spans: Sequence[Span], begin: float, microbatch: int) -> None:
    """A line through the middles of one micro-batch's forwards and backwards."""
    kinds = (Kind.F, Kind.B, Kind.I)
    way = [span for span in spans if span.action.microbatch == microbatch and span.action.kind in kinds]
    way.sort(key=lambda span: (span.start, span.end))
    axes.plot(
        [(span.start + span.end) / 2 - begin for span in way],
        [span.rank for span in way],
        color=DARK,
        linewidth=1.1,
        alpha=0.7,
        zorder=5,
    )


def _points(axes: "Axes", length: float) -> float:
    """How wide `length` on the time axis is, in points (1/72 inch)."""
    first, last = axes.get_xlim()
    return float(length / (last - first) * axes.bbox.width * 72 / axes.figure.dpi)


def _row_points(axes: "Axes", num_rows: int) -> float:
    return float(axes.bbox.height * 72 / axes.figure.dpi / num_rows)


def legend(timelines: Sequence[Timeline]) -> dict[str, str]:
    """What each colour in these timelines means, as name -> colour, forwards first."""
    entries: dict[str, str] = {}
    for timeline in timelines:
        shading = legs(timeline)
        drawn = {span.action for span in timeline.spans if span.end > span.start and not span.action.kind.is_message}
        for action in sorted(drawn, key=lambda action: (_ORDER.index(action.kind), action.stage)):
            entries.setdefault(name(action, shading), colour(action, shading))
    return entries


def facts(timeline: Timeline, unit: str) -> str:
    """What every picture says of a timeline."""
    return f"makespan {timeline.makespan:.4g}{f' {unit}' if unit else ''}, bubble {timeline.bubble_ratio:.1%}"
