"""The measurement: one timeline out of all ranks' traces, and the costs that a simulation needs to predict it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median

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
    """Each stage's mean times in seconds, and a message's delay. A backward in one piece is half of each gradient."""
    means = _means(batches)

    def per_stage(kind: Kind) -> tuple[float, ...]:
        whole = 0.0 if kind is Kind.F else 0.5
        stages = range(schedule.num_stages)
        return tuple(means.get((stage, kind), whole * means.get((stage, Kind.B), 0.0)) for stage in stages)

    forward, backward_input, backward_weight = map(per_stage, (Kind.F, Kind.I, Kind.W))
    return CostModel(forward, backward_input, backward_weight, message=message_delay(schedule, batches))


def message_delay(schedule: Schedule, batches: Sequence[Batch]) -> float:
    """T_C in seconds: from the end of an action to the start of the one on another rank that waited for its message."""
    delays = [delay for batch in batches for delay in _delays(schedule, batch)]
    return median(delays) if delays else 0.0


def _delays(schedule: Schedule, batch: Batch) -> Iterable[float]:
    ends = {event.action: event.end for events in batch for event in events}
    for events in batch:
        for event in events:
            producer = next((other for other in _producers(event.action) if other in ends), None)
            if event.start - event.asked > WAITED and producer is not None:
                yield max(0.0, event.start - ends[producer])


def _producers(action: Action) -> list[Action]:
    """What an action may wait for on another stage: one of these. A weight gradient waits for none."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.F:
            return [Action(stage - 1, Kind.F, microbatch)]
        case Kind.B | Kind.I:
            return [Action(stage + 1, kind, microbatch) for kind in (Kind.B, Kind.I)]
    return []


def _means(batches: Sequence[Batch]) -> dict[tuple[int, Kind], float]:
    durations: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for batch in batches:
        for events in batch:
            for event in events:
                durations[event.action.stage, event.action.kind].append(event.end - event.start)
    return {key: fmean(values) for key, values in durations.items()}


def _begin(batch: Batch) -> float:
    return min(event.start for events in batch for event in events)


def _end(batch: Batch) -> float:
    return max(event.end for events in batch for event in events)
