"""The crossing: what one event of a batch handed to an event on another rank, and how long that one waited for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_hanayo.runtime.trace import Event
from lightning_hanayo.schedule import Schedule
from lightning_hanayo.schedule.dependency import waits_in

Batch = Sequence[Sequence[Event]]
"""One batch's events, a list per pipeline rank."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A message as it ran.

    sender     |  sent  |----------.
    receiver   ...| asked           `->| start  taken  |
    """

    sender: int
    sent: Event
    receiver: int
    taken: Event

    @property
    def waited(self) -> float:
        """Seconds for which the receiver waited."""
        return self.taken.start - self.taken.asked

    @property
    def delay(self) -> float:
        """Seconds from the sender's end to the receiver's start: the message's own, where the receiver waited."""
        return max(0.0, self.taken.start - self.sent.end)

    @property
    def exposed(self) -> float:
        """Seconds for which the receiver waited for what was computed, but not there."""
        return max(0.0, self.taken.start - max(self.taken.asked, self.sent.end))


def crossings(schedule: Schedule, batch: Batch) -> Iterator[Crossing]:
    """All messages of a batch that ran by `schedule`."""
    place = {event.action: (rank, event) for rank, events in enumerate(batch) for event in events}
    lists = [[event.action for event in events] for events in batch]
    waits = waits_in(lists, schedule.num_stages, schedule.num_microbatches, schedule.num_chains)
    for action, others in waits.items():
        receiver, taken = place[action]
        for sender, sent in map(place.__getitem__, others):
            if sender != receiver:
                yield Crossing(sender, sent, receiver, taken)
