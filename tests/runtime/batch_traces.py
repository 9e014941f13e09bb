"""Makes batches of trace events: one event at a time, or from a simulation."""

from lightning_hanayo.pipeline_parallel.trace import BatchTrace, Event
from lightning_hanayo.schedule import Action, CostModel, Schedule, simulate


def event(action: str, reached: float, start: float, end: float) -> Event:
    """One event."""
    return Event(Action.parse(action), reached, start, end)


def simulated_batch(schedule: Schedule, costs: CostModel, begin: float = 100.0) -> BatchTrace:
    """A simulated batch: a rank reaches an action as soon as its previous one has ended."""
    batch: list[list[Event]] = [[] for _ in range(schedule.num_ranks)]
    for span in simulate(schedule, costs).spans:
        row = batch[span.rank]
        reached = row[-1].end if row else begin
        row.append(Event(span.action, reached, begin + span.start, begin + span.end))
    return batch
