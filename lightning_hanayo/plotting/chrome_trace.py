"""Writes timelines in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open.

process "hanayo"          thread "rank 0"  |0F0|0F1|...           a slice per action; arrows are messages
                          thread "rank 1"      |1F0|...
                          thread "rank 1, at the same time"       the second action of a pair
                          counter "activations, rank 0"           in M_a, a step function
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
        awaited = (waits or {}).get(name, ())
        compute = [span for span in timeline.spans if span.action.kind.is_compute]
        own = _TimelineEvents(process, timeline, 1e6 * seconds, awaited, span_lanes([*awaited, *compute]))
        events += own.events(name, first_flow=len(events))
    return {"displayTimeUnit": "ms", "traceEvents": events}


@dataclass(frozen=True)
class _TimelineEvents:
    """The events of one timeline, whose unit of time is `microseconds` long."""

    process: int
    timeline: Timeline
    microseconds: float
    waits: Sequence[Span]
    lanes: Mapping[Span, int]
    """of waits and compute actions: slices of one thread must not overlap"""

    def events(self, name: str, first_flow: int) -> Iterator[Event]:
        yield self._meta("process_name", None, name)
        yield from self._threads()
        for span in self.waits:
            yield self._slice(span, f"wait {span.action}", "wait", {})
        idle = idle_before(self.timeline)
        for step in self.timeline.steps:
            for span in step.spans:
                details: Event = {"stage": span.action.stage, "microbatch": span.action.microbatch}
                if span in idle:
                    details["idle_before_us"] = self._length(idle[span])
                category = KIND_NAMES.get(span.action.kind, "message")
                yield self._slice(span, str(span.action), category, details)
        yield from self._flows(first_flow)
        yield from self._counters()

    def _threads(self) -> Iterator[Event]:
        with_communication = {span.rank for span in self.timeline.spans if not span.action.kind.is_compute}
        lanes = {(span.rank, lane) for span, lane in self.lanes.items()}
        for rank in range(self.timeline.num_ranks):
            threads = {0: f"rank {rank}"}
            for lane in range(1, self._num_lanes):
                if (rank, lane) in lanes:
                    threads[lane] = f"rank {rank}, at the same time"
            if rank in with_communication:
                threads[self._num_lanes] = f"rank {rank}, communication"
            for thread, name in threads.items():
                number = self._thread_number(rank, thread)
                yield self._meta("thread_name", number, name)
                yield self._meta("thread_sort_index", number, number)

    def _meta(self, event_name: str, thread: int | None, value: str | int) -> Event:
        argument = "sort_index" if event_name.endswith("sort_index") else "name"
        target = {"pid": self.process} if thread is None else {"pid": self.process, "tid": thread}
        return {"ph": "M", **target, "name": event_name, "args": {argument: value}}

    def _slice(self, span: Span, name: str, category: str, details: Mapping[str, Any]) -> Event:
        event = {"ph": "X", **self._thread(span), "name": name, "cat": category, "ts": self._time(span.start)}
        event |= {"dur": self._length(span.end - span.start), "args": dict(details)}
        if category != "wait" and span.action.kind in _COLOURS:
            event["cname"] = _COLOURS[span.action.kind]
        return event

    def _flows(self, first: int) -> Iterator[Event]:
        """The arrows of messages. An arrow's end belongs to the slice that contains its time."""
        for number, (producer, consumer) in enumerate(timeline_messages(self.timeline), first):
            name = "activation" if consumer.action.kind is Kind.F else "gradient"
            common = {"cat": "message", "name": name, "id": number}
            sent = producer.start + 0.999 * (producer.end - producer.start)
            yield {"ph": "s", **self._thread(producer), **common, "ts": self._time(sent)}
            yield {"ph": "f", "bp": "e", **self._thread(consumer), **common, "ts": self._time(consumer.start)}

    def _counters(self) -> Iterator[Event]:
        for rank in range(self.timeline.num_ranks):
            for time, held in self.timeline.activations(rank):
                event = {"ph": "C", "pid": self.process, "tid": self._thread_number(rank, 0)}
                yield {**event, "name": f"activations, rank {rank}", "ts": self._time(time), "args": {"M_a": held}}

    def _thread(self, span: Span) -> Event:
        return {"pid": self.process, "tid": self._thread_number(span.rank, self.lanes.get(span, self._num_lanes))}

    def _thread_number(self, rank: int, thread: int) -> int:
        """The lanes of a rank have the first numbers, its communication has the last one."""
        return rank * (self._num_lanes + 1) + thread

    @cached_property
    def _num_lanes(self) -> int:
        return 1 + max(self.lanes.values(), default=0)

    def _time(self, time: float) -> float:
        return self._length(time - self.timeline.begin)

    def _length(self, length: float) -> float:
        return round(length * self.microseconds, 3)
