"""The measurement: one timeline out of all ranks' traces, and the costs that a simulation needs to predict it."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

from lightning_hanayo.runtime.profiling.message_timing import BatchTrace, message_timings
from lightning_hanayo.schedule import CostModel, Kind, Schedule, Span, Timeline

WAITED = 5e-5
"""seconds that a rank must have waited for a message before its delay says something about the message"""


def median_batch(batches: Sequence[BatchTrace]) -> BatchTrace:
    """The batch whose duration is the median one."""
    order = sorted(batches, key=lambda batch: _end(batch) - _begin(batch))
    return order[len(order) // 2]


def timeline_of(schedule: Schedule, *batches: BatchTrace) -> Timeline:
    """When what ran, in seconds from the first action on: each batch a step, in the order in which they ran."""
    begin = min(map(_begin, batches))
    spans = [Span(rank, event.action, event.start - begin, event.end - begin)
             for batch in batches for rank, events in enumerate(batch) for event in events]  # fmt: skip
    return Timeline.of(schedule, spans, len(batches))


def waits_of(*batches: BatchTrace) -> list[Span]:
    """When ranks waited for a message, and for which action; on the same time axis as `timeline_of`."""
    begin = min(map(_begin, batches))
    return [Span(rank, event.action, max(0.0, event.reached - begin), event.start - begin)
            for batch in batches for rank, events in enumerate(batch) for event in events
            if event.start - event.reached > WAITED and event.start > begin]  # fmt: skip


def costs_of(schedule: Schedule, batches: Sequence[BatchTrace]) -> CostModel:
    """Each stage's mean times in seconds, and a message's delay. A backward in one piece is half of each gradient."""
    means = stage_times(batches)

    def per_stage(kind: Kind) -> tuple[float, ...]:
        whole = 0.0 if kind is Kind.F else 0.5
        stages = range(schedule.num_stages)
        return tuple(means.get((stage, kind), whole * means.get((stage, Kind.B), 0.0)) for stage in stages)

    forward, backward_input, backward_weight = map(per_stage, (Kind.F, Kind.I, Kind.W))
    return CostModel(forward, backward_input, backward_weight, message=message_delay(schedule, batches))


def message_delay(schedule: Schedule, batches: Sequence[BatchTrace]) -> float:
    """T_C in seconds: from the end of an action to the start of the one on another rank that waited for its message."""
    messages = (message for batch in batches for message in message_timings(schedule, batch))
    delays = [message.delay for message in messages if message.waited > WAITED]
    return median(delays) if delays else 0.0


def exposed_communication(schedule: Schedule, batch: BatchTrace) -> float:
    """The part of all ranks' time in which they waited for messages that were computed, but not there yet.

    A rank's wait counts from when it had nothing left to do before that action, or the sender's end if that is later,
    until the message was there. The rest of the bubble is the order, uneven stages, and what lies between actions. The
    reduction over data ranks isn't counted.
    """
    exposed = sum(message.exposed for message in message_timings(schedule, batch))
    return exposed / (len(batch) * (_end(batch) - _begin(batch)))


def stage_times(batches: Sequence[BatchTrace]) -> dict[tuple[int, Kind], float]:
    """How long each stage's actions of each kind took, in seconds, on average over micro-batches and batches."""
    durations: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for batch in batches:
        for events in batch:
            for event in events:
                durations[event.action.stage, event.action.kind].append(event.end - event.start)
    return {key: fmean(values) for key, values in durations.items()}


def _begin(batch: BatchTrace) -> float:
    return min(event.start for events in batch for event in events)


def _end(batch: BatchTrace) -> float:
    return max(event.end for events in batch for event in events)
