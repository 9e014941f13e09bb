"""Finds the messages between ranks, and the idle time before each action, in a timeline."""

from collections.abc import Iterator
from typing import NamedTuple

from lightning_hanayo.schedule import Span, Timeline
from lightning_hanayo.schedule.dependency import waits_in


class TimelineMessage(NamedTuple):
    """`consumer` waits for a tensor that `producer` computed on another rank."""

    producer: Span
    consumer: Span


def timeline_messages(timeline: Timeline) -> Iterator[TimelineMessage]:
    """The messages of all steps."""
    for step in timeline.steps:
        span_of = {span.action: span for span in step.spans if span.action.kind.is_compute}
        num_stages = 1 + max((action.stage for action in span_of), default=0)
        num_microbatches = 1 + max((action.microbatch or 0 for action in span_of), default=0)
        waits = waits_in([list(span_of)], num_stages, num_microbatches)
        for action, span in span_of.items():
            for other in waits[action]:
                if span_of[other].rank != span.rank:
                    yield TimelineMessage(span_of[other], span)


def idle_before(timeline: Timeline) -> dict[Span, float]:
    """For each compute span: how long its rank had been idle when it started."""
    idle: dict[Span, float] = {}
    free_since = [timeline.begin] * timeline.num_ranks
    for span in sorted(timeline.spans, key=lambda span: (span.start, span.end)):
        if span.action.kind.is_compute:
            idle[span] = max(0.0, span.start - free_since[span.rank])
            free_since[span.rank] = max(free_since[span.rank], span.end)
    return idle
