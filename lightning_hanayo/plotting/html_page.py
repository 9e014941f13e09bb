"""Writes timelines as one self-contained HTML page, in which hovering over an action shows its micro-batch's path.

title, legend, zoom
rank 0   | 0 1 2 3 .  0 0  1 1 ...            a box per action
rank 1   |   0 1 2 .  .  ...
peak 2   | __/~~~\\__                          each rank's activations, in M_a
peak 2   |   _/~~~\\_
"""

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting.messages import idle_before, timeline_messages
from lightning_hanayo.plotting.palette import (
    ACTIVATION_COLOUR,
    IDLE_COLOUR,
    KIND_NAMES,
    action_colour,
    legend_entries,
    text_colour,
    wave_legs,
)
from lightning_hanayo.plotting.timeline_axes import summary
from lightning_hanayo.schedule import Kind, Span, Timeline
from lightning_hanayo.schedule.action import COMPUTE

MAX_SPANS = 100_000
"""more make a browser slow"""

_MIN_BOX_WIDTH = 17
"""pixels, if there is room: a number of two digits fits"""


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
    text = json.dumps(_data(timelines, unit), separators=(",", ":")).replace("</", "<\\/")
    template = Template((files(__package__) / "html_page.html").read_text(encoding="utf-8"))
    try:
        Path(path).write_text(template.substitute(title=escape(title), data=text), encoding="utf-8")
    except OSError as error:
        raise HanayoError(f"{path} can't be written: {error.strerror or error}") from None


def _data(timelines: Mapping[str, Timeline], unit: str) -> dict[str, Any]:
    entries = legend_entries(timelines.values())
    colours = {colour: number for number, colour in enumerate(dict.fromkeys(entries.values()))}
    return {
        "unit": unit,
        "idle": IDLE_COLOUR,
        "activations": ACTIVATION_COLOUR,
        "compute": sorted(COMPUTE),
        "kinds": {**KIND_NAMES, Kind.REDUCE_GRAD: "gradient reduction"},
        "colours": [(colour, text_colour(colour)) for colour in colours],
        "legend": [(label, colours[colour]) for label, colour in entries.items()],
        "scale": max((_MIN_BOX_WIDTH / _narrowest(timeline) for timeline in timelines.values()), default=1.0),
        "timelines": [_timeline(name, timeline, colours) for name, timeline in timelines.items()],
    }


def _timeline(name: str, timeline: Timeline, colours: Mapping[str, int]) -> dict[str, Any]:
    begin = timeline.begin
    idle, sources = idle_before(timeline), _sources(timeline)
    legs = wave_legs(timeline)
    shown = [
        (number, span)
        for number, step in enumerate(timeline.steps)
        for span in step.spans
        if span.end > span.start and not span.action.kind.is_message
    ]
    return {
        "name": name,
        "summary": summary(timeline, ""),
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
                colours[action_colour(span.action, legs)],
                round(idle.get(span, 0.0), 9),
                sources.get(span),
                number,
            )
            for number, span in shown
        ],
        "activations": [
            [(round(time - begin, 9), held) for time, held in timeline.activations(rank)]
            for rank in range(timeline.num_ranks)
        ],
    }


def _sources(timeline: Timeline) -> dict[Span, str]:
    """For each span that waits for messages: the sender of the last one, in words."""
    last_sender: dict[Span, Span] = {}
    for message in timeline_messages(timeline):
        before = last_sender.get(message.consumer)
        if before is None or message.producer.end > before.end:
            last_sender[message.consumer] = message.producer
    return {consumer: f"{producer.action} on rank {producer.rank}" for consumer, producer in last_sender.items()}


def _narrowest(timeline: Timeline) -> float:
    lengths = (span.end - span.start for span in timeline.spans if span.action.kind.is_compute)
    return min((length for length in lengths if length > 0), default=1.0)
