"""Writes timelines as one self-contained HTML page, in which hovering over an action shows its micro-batch's path.

title, legend, zoom
rank 0   | 0 1 2 3 .  0 0  1 1 ...            a box per action
rank 1   |   0 1 2 .  .  ...                  half as high while a rank has two actions at once
peak 2   | __/~~~\\__                          each rank's activations, in M_a
peak 2   |   _/~~~\\_
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting import palette
from lightning_hanayo.plotting.lanes import Parts, span_parts
from lightning_hanayo.plotting.pages.filled import save_filled
from lightning_hanayo.plotting.timeline_axes import summary
from lightning_hanayo.plotting.timeline_messages import idle_before, timeline_messages
from lightning_hanayo.schedule import Span, Timeline
from lightning_hanayo.schedule.action import COMPUTE

MAX_SPANS = 100_000
"""more make a browser slow"""


def save_page(path: str | Path, title: str, timelines: Mapping[str, Timeline], *, unit: str = "") -> None:
    """Write the page.

    Args:
        path: the file, usually ending in .html.
        title: at the top of the page.
        timelines: simulated or measured, by name; drawn to one scale.
        unit: of time, e.g. `"s"`.

    Raises:
        HanayoError: there are too many spans for a page, or the file can't be written.
    """
    count = sum(len(timeline.spans) for timeline in timelines.values())
    if count > MAX_SPANS:
        raise HanayoError(
            f"{path}: a page shows at most {MAX_SPANS} actions, got {count}; draw fewer micro-batches or ranks, or "
            "write a trace (.json) and open it in ui.perfetto.dev"
        )
    save_filled(path, "timelines.html", title, _data(timelines, unit))


def _data(timelines: Mapping[str, Timeline], unit: str) -> dict[str, Any]:
    entries = palette.legend_entries(timelines.values())
    colours = {colour: number for number, colour in enumerate(dict.fromkeys(entries.values()))}
    return {
        "unit": unit,
        "idle": palette.IDLE_COLOUR,
        "activations": palette.ACTIVATION_COLOUR,
        "compute": sorted(COMPUTE),
        "kinds": palette.KIND_NAMES,
        "colours": [(colour, palette.text_colour(colour)) for colour in colours],
        "legend": [(label, colours[colour]) for label, colour in entries.items()],
        "timelines": [_timeline(name, timeline, colours) for name, timeline in timelines.items()],
    }


def _timeline(name: str, timeline: Timeline, colours: Mapping[str, int]) -> dict[str, Any]:
    begin, legs = timeline.begin, palette.wave_legs(timeline)
    idle, sources = idle_before(timeline), _sources(timeline)
    boxes = span_parts(span for span in palette.drawn_spans(timeline) if span.action.kind.is_compute)
    return {
        "name": name,
        "summary": summary(timeline),
        "ranks": timeline.num_ranks,
        "makespan": timeline.makespan,
        "spans": [
            (
                span.rank,
                span.action.stage,
                span.action.kind,
                span.action.microbatch,
                round(span.start - begin, 9),
                round(span.end - begin, 9),
                colours[palette.action_colour(span.action, legs)],
                round(idle.get(span, 0.0), 9),
                sources.get(span),
                number,
                _shown_parts(boxes.get(span, ()), begin),
            )
            for number, step in enumerate(timeline.steps)
            for span in palette.drawn_spans(step)
        ],
        "activations": [
            [(round(time - begin, 9), held) for time, held in timeline.activations(rank)]
            for rank in range(timeline.num_ranks)
        ],
    }


def _shown_parts(parts: Parts, begin: float) -> list[tuple[float, ...]] | None:
    """The parts of a box, or None for a plain box: start, end, top and bottom."""
    if all(part.is_whole for part in parts):
        return None
    return [(round(part.start - begin, 9), round(part.end - begin, 9), part.top, part.bottom) for part in parts]


def _sources(timeline: Timeline) -> dict[Span, str]:
    """For each span that waits for messages: the sender of the last one, in words."""
    last_sender: dict[Span, Span] = {}
    for producer, consumer in timeline_messages(timeline):
        if consumer not in last_sender or producer.end > last_sender[consumer].end:
            last_sender[consumer] = producer
    return {consumer: f"{producer.action} on rank {producer.rank}" for consumer, producer in last_sender.items()}
