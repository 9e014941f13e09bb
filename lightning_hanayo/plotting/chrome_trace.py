"""Writes timelines in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open.

process "hanayo"          thread "rank 0"  |0F0|0F1|...           a slice per action; arrows are messages
                          thread "rank 1"      |1F0|...
                          thread "rank 1, at the same time"       the second action of a pair
                          counter "activations, rank 0"           in M_a, a step function
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_hanayo.errors import writing
from lightning_hanayo.plotting.palette import KIND_NAMES
from lightning_hanayo.plotting.timeline import idle_before, span_lanes, timeline_messages
from lightning_hanayo.schedule import Kind, Span, Timeline

Event = dict[str, Any]
Waits = Mapping[str, Sequence[Span]]
"""by the names of the timelines, spans in which a rank waited for the inputs of an action"""

_COLOURS = {
    Kind.F: "rail_response",
    Kind.B: "rail_idle",
    Kind.I: "rail_animation",
    Kind.W: "grey",
    Kind.REDUCE_GRAD: "rail_load",
}
"""chrome://tracing accepts only named colours: here blue, orange, red, grey, green. Perfetto chooses its own."""


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
        colour = {"cname": _COLOURS[action.kind]} if action.kind in _COLOURS else {}
        yield piece(span, str(action), KIND_NAMES.get(action.kind, "message"), details) | colour
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
