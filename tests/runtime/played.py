"""Batches as a trace would hold them: drawn event by event, or played by the simulation."""

from lightning_hanayo.runtime.profiling.message_timing import BatchTrace
from lightning_hanayo.runtime.profiling.trace import Event
from lightning_hanayo.schedule import Action, CostModel, Schedule, simulate


def event(action: str, reached: float, start: float, end: float) -> Event:
    """One event."""
    return Event(Action.parse(action), reached, start, end)


def played(schedule: Schedule, costs: CostModel, begin: float = 100.0) -> BatchTrace:
    """A simulated batch: a rank asks for an action's message as soon as it has nothing else to do."""
    batch: list[list[Event]] = [[] for _ in range(schedule.num_ranks)]
    for span in simulate(schedule, costs).spans:
        row = batch[span.rank]
        reached = row[-1].end if row else begin
        row.append(Event(span.action, reached, begin + span.start, begin + span.end))
    return batch
