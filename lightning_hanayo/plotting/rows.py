"""Rows: a timeline drawn on a matplotlib axes, one row per pipeline rank, rank 0 on top.

rank 0 | 0 1 2 3 .  0 0  1 1 ...
rank 1 |   0 1 2 .  .  ...
         time ->                  a box per action, its micro-batch inside where it fits; idle shows the ground
"""

from collections import defaultdict
from typing import TYPE_CHECKING

from lightning_hanayo.plotting.palette import IDLE, colour, name
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
) -> None:
    """Draw `timeline` on `axes`, times counted from its first start.

    Args:
        timeline: simulated or measured.
        axes: where to draw.
        title: stands before makespan and bubble ratio, which every picture shows.
        unit: of time, e.g. `"s"`.
        until: the right end of the time axis, to draw two timelines to one scale; None: the makespan.
    """
    until = until or timeline.makespan or 1.0
    legs = _legs(timeline)
    for rank in range(timeline.num_ranks):
        axes.barh(rank, until, height=HEIGHT, color=IDLE, zorder=0)
    _draw_boxes(timeline, axes, legs, until)
    for span in timeline.spans:
        _draw_number(axes, span, timeline.begin, until, timeline.num_ranks)
    axes.set_xlim(0, until)
    axes.set_ylim(max(1, timeline.num_ranks) - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel(f"time [{unit}]" if unit else "time")
    facts = f"makespan {_number(timeline.makespan)}{f' {unit}' if unit else ''}, bubble {timeline.bubble_ratio:.1%}"
    axes.set_title(f"{title}: {facts}" if title else facts, loc="left", fontsize=10)


def _draw_boxes(timeline: Timeline, axes: "Axes", legs: dict[int, int | None], until: float) -> None:
    """One collection per row and colour: thousands of single boxes would take seconds."""
    boxes: dict[tuple[int, str, bool], list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        if span.end > span.start and not span.action.kind.is_message:
            key = span.rank, colour(span.action, legs[span.action.stage]), span.action.kind.is_compute
            boxes[key].append((span.start - timeline.begin, span.end - span.start))
    for (rank, shade, compute), places in boxes.items():
        narrowest = min(length for _, length in places)
        axes.broken_barh(
            places,
            (rank - HEIGHT / 2, HEIGHT) if compute else (rank + HEIGHT / 2 - 0.18, 0.18),
            facecolor=shade,
            edgecolor="white",
            linewidth=min(0.6, 0.1 * _points(axes, narrowest, until)),
            zorder=2 if compute else 3,
        )


def _draw_number(axes: "Axes", span: Span, begin: float, until: float, num_rows: int) -> None:
    if span.end <= span.start or not span.action.kind.is_compute:
        return
    text = str(span.action.microbatch)
    fits = _points(axes, span.end - span.start, until) / (0.68 * len(text))
    size = min(9.0, 0.55 * HEIGHT * _row_points(axes, num_rows), fits)
    if size >= SMALLEST:
        middle = ((span.start + span.end) / 2 - begin, span.rank)
        axes.text(*middle, text, ha="center", va="center_baseline", fontsize=size, color="#1c1c1c", zorder=4)


def _points(axes: "Axes", length: float, until: float) -> float:
    """How wide `length` on the time axis is, in points (1/72 inch)."""
    return float(length / until * axes.bbox.width * 72 / axes.figure.dpi)


def _row_points(axes: "Axes", num_rows: int) -> float:
    return float(axes.bbox.height * 72 / axes.figure.dpi / num_rows)


def legend(timelines: list[Timeline]) -> dict[str, str]:
    """What each colour in these timelines means, as name -> colour, forwards first."""
    entries: dict[str, str] = {}
    for timeline in timelines:
        legs = _legs(timeline)
        num_legs = len({leg for leg in legs.values() if leg is not None})
        drawn = {span.action for span in timeline.spans if span.end > span.start and not span.action.kind.is_message}
        for action in sorted(drawn, key=lambda action: (_ORDER.index(action.kind), action.stage)):
            entries.setdefault(name(action, legs[action.stage], num_legs), colour(action, legs[action.stage]))
    return entries


def _legs(timeline: Timeline) -> dict[int, int | None]:
    """The leg of each stage: its number among its rank's stages, which in a wave turns at each end of the ranks."""
    rank_of = {span.action.stage: span.rank for span in timeline.spans}
    count = [0] * timeline.num_ranks
    legs: dict[int, int | None] = {}
    for stage, rank in sorted(rank_of.items()):
        is_loss = bool(timeline.shares) and timeline.shares[stage] == 0
        legs[stage] = None if is_loss else count[rank]
        count[rank] += not is_loss
    return legs


def _number(value: float) -> str:
    return f"{value:.4g}"
