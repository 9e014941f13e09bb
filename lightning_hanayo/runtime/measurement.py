"""The measurement: one timeline out of all ranks' traces, and the costs that a simulation needs to predict it."""

from collections.abc import Iterable, Sequence
from statistics import median

from lightning_hanayo.runtime.trace import Event
from lightning_hanayo.schedule import Action, CostModel, Kind, Schedule, Span, Timeline

Batch = Sequence[Sequence[Event]]
"""One batch's events, a list per pipeline rank."""
WAITED = 5e-5
"""seconds that a rank must have waited for a message before its delay says something about the message"""


def typical(batches: Sequence[Batch]) -> Batch:
    """The batch whose duration is the median one."""
    order = sorted(batches, key=lambda batch: _end(batch) - _begin(batch))
    return order[len(order) // 2]


def timeline_of(schedule: Schedule, batch: Batch) -> Timeline:
    """When what ran, in seconds from the first action on."""
    begin = _begin(batch)
    spans = [Span(rank, event.action, event.start - begin, event.end - begin)
             for rank, events in enumerate(batch) for event in events]  # fmt: skip
    return Timeline.of(schedule, spans)


def costs_of(schedule: Schedule, batches: Sequence[Batch]) -> CostModel:
    """Each stage's mean forward and backward in seconds, a backward half for each gradient; and a message's delay."""
    forward = [_mean(batches, stage, Kind.F) for stage in range(schedule.num_stages)]
    backward = [_mean(batches, stage, Kind.B) / 2 for stage in range(schedule.num_stages)]
    return CostModel(tuple(forward), tuple(backward), tuple(backward), message=message_delay(schedule, batches))


def message_delay(schedule: Schedule, batches: Sequence[Batch]) -> float:
    """T_C in seconds: from the end of an action to the start of the one on another rank that waited for its message."""
    delays = [delay for batch in batches for delay in _delays(schedule, batch)]
    return median(delays) if delays else 0.0


def _delays(schedule: Schedule, batch: Batch) -> Iterable[float]:
    ends = {event.action: event.end for events in batch for event in events}
    for events in batch:
        for event in events:
            producer = _producer(event.action)
            if event.start - event.asked > WAITED and producer in ends:
                yield max(0.0, event.start - ends[producer])


def _producer(action: Action) -> Action:
    """What an action waits for on another stage."""
    return Action(action.stage + (-1 if action.kind is Kind.F else 1), action.kind, action.microbatch)


def _mean(batches: Sequence[Batch], stage: int, kind: Kind) -> float:
    durations = [event.end - event.start for batch in batches for events in batch for event in events
                 if event.action.stage == stage and event.action.kind is kind]  # fmt: skip
    return sum(durations) / len(durations) if durations else 0.0


def _begin(batch: Batch) -> float:
    return min(event.start for events in batch for event in events)


def _end(batch: Batch) -> float:
    return max(event.end for events in batch for event in events)
