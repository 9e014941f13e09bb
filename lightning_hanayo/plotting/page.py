"""Page: timelines as one HTML file that loads nothing: hover shows an action, follows its micro-batch over the ranks.

title, legend, zoom
rank 0   | 0 1 2 3 .  0 0  1 1 ...            a box per action
rank 1   |   0 1 2 .  .  ...
peak 2   | __/~~~\\__                          the activations that each rank holds, in M_a
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
from lightning_hanayo.plotting.legs import legs
from lightning_hanayo.plotting.messages import idle_before, messages
from lightning_hanayo.plotting.palette import HELD, IDLE, NAMES, colour, ink
from lightning_hanayo.plotting.rows import legend
from lightning_hanayo.schedule import Kind, Span, Timeline
from lightning_hanayo.schedule.action import COMPUTE

MOST_SPANS = 100_000
"""that a browser still moves through smoothly"""

_BOX = 17
"""pixels of the narrowest box where there is room: a number of two digits fits"""


def save_page(path: str | Path, title: str, timelines: Mapping[str, Timeline], *, unit: str = "") -> None:
    """Write the page.

    Args:
        path: the file, usually ending in .html.
        title: above everything.
        timelines: simulated or measured, by the name each gets, drawn to one scale.
        unit: of time, e.g. `"s"`.

    Raises:
        HanayoError: there are too many spans for a page, or the file can't be written.
    """
    count = sum(len(timeline.spans) for timeline in timelines.values())
    if count > MOST_SPANS:
        raise HanayoError(
            f"{path}: a page shows at most {MOST_SPANS} actions, got {count}; draw fewer micro-batches or ranks, or "
            "write a trace (.json) and open it in ui.perfetto.dev"
        )
    text = json.dumps(_data(timelines, unit), separators=(",", ":")).replace("</", "<\\/")
    template = Template((files(__package__) / "page.html").read_text(encoding="utf-8"))
    try:
        Path(path).write_text(template.substitute(title=escape(title), data=text), encoding="utf-8")
    except OSError as error:
        raise HanayoError(f"{path} can't be written: {error.strerror or error}") from None


def _data(timelines: Mapping[str, Timeline], unit: str) -> dict[str, Any]:
    entries = legend(list(timelines.values()))
    shades = {shade: number for number, shade in enumerate(dict.fromkeys(entries.values()))}
    return {
        "unit": unit,
        "idle": IDLE,
        "held": HELD,
        "compute": sorted(COMPUTE),
        "kinds": {**NAMES, Kind.REDUCE_GRAD: "gradient reduction"},
        "shades": [(shade, ink(shade)) for shade in shades],
        "legend": [(name, shades[shade]) for name, shade in entries.items()],
        "wanted": max((_BOX / _narrowest(timeline) for timeline in timelines.values()), default=1.0),
        "timelines": [_timeline(name, timeline, shades) for name, timeline in timelines.items()],
    }


def _timeline(name: str, timeline: Timeline, shades: Mapping[str, int]) -> dict[str, Any]:
    begin = timeline.begin
    idle, sources = idle_before(timeline), _sources(timeline)
    shading = legs(timeline)
    shown = [
        (number, span)
        for number, step in enumerate(timeline.steps)
        for span in step.spans
        if span.end > span.start and not span.action.kind.is_message
    ]
    return {
        "name": name,
        "figures": f"makespan {timeline.makespan:.4g}, bubble {timeline.bubble_ratio:.1%}",
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
                shades[colour(span.action, shading)],
                round(idle.get(span, 0.0), 9),
                sources.get(span),
                number,
            )
            for number, span in shown
        ],
        "held": [
            [(round(time - begin, 9), held) for time, held in timeline.activations(rank)]
            for rank in range(timeline.num_ranks)
        ],
    }


def _sources(timeline: Timeline) -> dict[Span, str]:
    """For each span that a message reached last, what sent it."""
    latest: dict[Span, Span] = {}
    for message in messages(timeline):
        before = latest.get(message.consumer)
        if before is None or message.producer.end > before.end:
            latest[message.consumer] = message.producer
    return {consumer: f"{producer.action} on rank {producer.rank}" for consumer, producer in latest.items()}


def _narrowest(timeline: Timeline) -> float:
    lengths = (span.end - span.start for span in timeline.spans if span.action.kind.is_compute)
    return min((length for length in lengths if length > 0), default=1.0)
