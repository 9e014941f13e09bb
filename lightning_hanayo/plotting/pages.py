"""Fills the template of a page with its title and its data, and writes it.

The page of a plan: time over memory of all layouts, each by its name, and the table of the fastest, which sorts.

Writes timelines as one self-contained HTML page, in which hovering over an action shows its micro-batch's path.

title, legend, zoom
rank 0   | 0 1 2 3 .  0 0  1 1 ...            a box per action
rank 1   |   0 1 2 .  .  ...                  half as high if the rank runs another action at once
peak 2   | __/~~~\\__                          each rank's activations, in M_a
peak 2   |   _/~~~\\_
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lightning_hanayo.errors import HanayoError, writing
from lightning_hanayo.plotting import palette
from lightning_hanayo.plotting.layouts import FRONTIER, NUMBERED, POINT, Dot, frontier_of, worth_showing
from lightning_hanayo.plotting.timeline import box_heights, idle_before, summary, timeline_messages
from lightning_hanayo.schedule import Span, Timeline
from lightning_hanayo.schedule.table import COMPUTE


def save_filled(path: str | Path, template: str, title: str, data: Any) -> None:
    """Write the page: `template` of this package, with a title and with data for its script.

    Raises:
        HanayoError: the file can't be written.
    """
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    page = Template((files(__package__) / template).read_text(encoding="utf-8"))
    with writing(path):
        Path(path).write_text(page.substitute(title=escape(title), data=text), encoding="utf-8")


def save_layouts_page(
    path: str | Path,
    dots: Sequence[Dot],
    numbered: Sequence[Dot],
    *,
    limit: float,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> None:
    """Write the page.

    Args:
        path: the file, usually ending in .html.
        dots: all layouts that fit.
        numbered: those of the table, in its order.
        limit: bytes that a device has for them.
        title: at the top.
        columns: of the table.
        rows: of the table, one for each of `numbered`.

    Raises:
        HanayoError: the file can't be written.
    """
    shown = worth_showing(dots, numbered)
    data = {
        "limit": limit / 1e9,
        "count": len(dots),
        "colours": {"point": POINT, "frontier": FRONTIER, "numbered": NUMBERED},
        "dots": [_dot(one) for one in shown],
        "frontier": [_dot(one)[:2] for one in frontier_of(shown)],
        "numbered": [_dot(one) for one in numbered],
        "columns": list(columns),
        "rows": [list(row) for row in rows],
    }
    save_filled(path, "layouts.html", title, data)


def _dot(one: Dot) -> tuple[float, float, str]:
    """Gigabytes, seconds, name."""
    return float(f"{one.num_bytes / 1e9:.4g}"), float(f"{one.seconds:.5g}"), one.name


MAX_SPANS = 100_000
"""more make a browser slow"""


def save_page(
    path: str | Path,
    title: str,
    timelines: Mapping[str, Timeline],
    *,
    unit: str = "",
    choices: Mapping[str, Sequence[str | None]] | None = None,
) -> None:
    """Write the page.

    Args:
        path: the file, usually ending in .html.
        title: at the top of the page.
        timelines: simulated or measured, by name; drawn to one scale.
        unit: of time, e.g. `"s"`.
        choices: what the reader chooses, by name: the value for each timeline, or None for one that is there with any
            value. Those with all the chosen values are drawn.

    Raises:
        HanayoError: there are too many spans for a page, or the file can't be written.
    """
    count = sum(len(timeline.spans) for timeline in timelines.values())
    if count > MAX_SPANS:
        way_out = "draw fewer micro-batches or ranks, or write a trace (.json) and open it in ui.perfetto.dev"
        raise HanayoError(f"{path}: a page shows at most {MAX_SPANS} actions, got {count}; {way_out}")
    save_filled(path, "timelines.html", title, _data(timelines, unit, choices or {}))


def _data(timelines: Mapping[str, Timeline], unit: str, choices: Mapping[str, Sequence[str | None]]) -> dict[str, Any]:
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
        "choices": list(choices),
        "timelines": [
            _timeline(name, timeline, colours) | {"choice": [values[number] for values in choices.values()]}
            for number, (name, timeline) in enumerate(timelines.items())
        ],
    }


def _timeline(name: str, timeline: Timeline, colours: Mapping[str, int]) -> dict[str, Any]:
    begin, legs = timeline.begin, palette.wave_legs(timeline)
    idle, sources = idle_before(timeline), _sources(timeline)
    heights = box_heights(span for span in palette.drawn_spans(timeline) if span.action.kind.is_compute)

    def drawn(step: int, span: Span) -> tuple[object, ...]:
        """A box, as the page's script reads it."""
        action, (first, last) = span.action, (round(time - begin, 9) for time in (span.start, span.end))
        colour, waited = colours[palette.action_colour(action, legs)], round(idle.get(span, 0.0), 9)
        own = span.rank, action.stage, action.kind, action.microbatch
        return *own, first, last, colour, waited, sources.get(span), step, heights.get(span)

    return {
        "name": name,
        "summary": summary(timeline),
        "ranks": timeline.num_ranks,
        "makespan": timeline.makespan,
        "spans": [
            drawn(number, span) for number, step in enumerate(timeline.steps) for span in palette.drawn_spans(step)
        ],
        "activations": [
            [(round(time - begin, 9), held) for time, held in timeline.activations(rank)]
            for rank in range(timeline.num_ranks)
        ],
    }


def _sources(timeline: Timeline) -> dict[Span, str]:
    """For each span that waits for messages: the sender of the last one, in words."""
    last_sender: dict[Span, Span] = {}
    for producer, consumer in timeline_messages(timeline):
        if consumer not in last_sender or producer.end > last_sender[consumer].end:
            last_sender[consumer] = producer
    return {consumer: f"{producer.action} on rank {producer.rank}" for consumer, producer in last_sender.items()}
