"""The crossing: what one event of a batch handed to an event on another rank, and how long that one waited for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_hanayo.runtime.profiling.trace import Event
from lightning_hanayo.schedule import Schedule
from lightning_hanayo.schedule.dependency import producers

BatchTrace = Sequence[Sequence[Event]]
"""One batch's events, a list per pipeline rank."""


@dataclass(frozen=True, slots=True)
class MessageTiming:
    """A message as it ran.

    sender     |  sent  |----------.
    receiver   ...| asked           `->| start  taken  |
    """

    sender: int
    sent: Event
    receiver: int
    received: Event

    @property
    def waited(self) -> float:
        """Seconds for which the receiver waited."""
        return self.received.start - self.received.reached

    @property
    def delay(self) -> float:
        """Seconds from the sender's end to the receiver's start: the message's own, where the receiver waited."""
        return max(0.0, self.received.start - self.sent.end)

    @property
    def exposed(self) -> float:
        """Seconds for which the receiver waited for what was computed, but not there."""
        return max(0.0, self.received.start - max(self.received.reached, self.sent.end))


def message_timings(schedule: Schedule, batch: BatchTrace) -> Iterator[MessageTiming]:
    """All messages of a batch that ran by `schedule`, each rank in its row's order."""
    for (sender, there), (receiver, here) in _places(schedule):
        yield MessageTiming(sender, batch[sender][there], receiver, batch[receiver][here])


Place = tuple[int, int]
"""a rank, and where in its row"""


@lru_cache(maxsize=8)
def _places(schedule: Schedule) -> tuple[tuple[Place, Place], ...]:
    """Where the two ends of each message stand."""
    rows = schedule.actions
    place = {action: (rank, number) for rank, row in enumerate(rows) for number, action in enumerate(row)}
    ends = ((place[sent], place[taken]) for taken, sent in producers(schedule).items())
    return tuple((sent, taken) for sent, taken in ends if sent[0] != taken[0])
