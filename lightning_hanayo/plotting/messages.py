"""Messages: which spans of a timeline hand something to a span on another rank, and what each span waits for."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_hanayo.schedule import Action, Span, Timeline
from lightning_hanayo.schedule.dependency import waits_in


@dataclass(frozen=True, slots=True)
class Message:
    """What `consumer` waits for arrives from `producer`, on another rank."""

    producer: Span
    consumer: Span


def messages(timeline: Timeline) -> Iterator[Message]:
    """Every message of every step. Those of chimera's copies stay apart, since a micro-batch visits one of them."""
    for step in timeline.steps:
        compute = [span for span in step.spans if span.action.kind.is_compute]
        span_of = {span.action: span for span in compute}
        waits = waits_in([[span.action for span in compute]], *_sizes(span_of))
        for span in compute:
            for other in waits[span.action]:
                if span_of[other].rank != span.rank:
                    yield Message(span_of[other], span)


def idle_before(timeline: Timeline) -> dict[Span, float]:
    """How long each compute span's rank had been idle when it started."""
    idle: dict[Span, float] = {}
    free = [timeline.begin] * timeline.num_ranks
    for span in sorted(timeline.spans, key=lambda span: (span.start, span.end)):
        if span.action.kind.is_compute:
            idle[span] = max(0.0, span.start - free[span.rank])
            free[span.rank] = max(free[span.rank], span.end)
    return idle


def _sizes(actions: dict[Action, Span]) -> tuple[int, int]:
    stages = 1 + max((action.stage for action in actions), default=0)
    return stages, 1 + max((action.microbatch or 0 for action in actions), default=0)
