"""The timing of messages between ranks: how long each took, and how long its receiver waited for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_hanayo.runtime.profiling.trace import Event
from lightning_hanayo.schedule import Schedule
from lightning_hanayo.schedule.dependency import producers

BatchTrace = Sequence[Sequence[Event]]
"""One batch's events, one list for each pipeline rank."""


@dataclass(frozen=True, slots=True)
class MessageTiming:
    """The two events of a message: `sent` made it, `received` waited for it.

    sender     |  sent  |----------.
    receiver   ...| reached         `->| start  received  |
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
        """Seconds from the sender's end to the receiver's start: how long the message took, if the receiver waited."""
        return max(0.0, self.received.start - self.sent.end)

    @property
    def exposed(self) -> float:
        """Seconds for which the receiver waited after the sender had finished."""
        return max(0.0, self.received.start - max(self.received.reached, self.sent.end))


def message_timings(schedule: Schedule, batch: BatchTrace) -> Iterator[MessageTiming]:
    """Yield all messages of a batch that ran by `schedule`."""
    for (sender, i), (receiver, j) in _message_ends(schedule):
        yield MessageTiming(sender, batch[sender][i], receiver, batch[receiver][j])


Position = tuple[int, int]
"""a rank, and an index in its row of the schedule"""


@lru_cache(maxsize=8)
def _message_ends(schedule: Schedule) -> tuple[tuple[Position, Position], ...]:
    """The positions of each message's sender and receiver."""
    rows = schedule.actions
    position = {action: (rank, number) for rank, row in enumerate(rows) for number, action in enumerate(row)}
    ends = ((position[sent], position[received]) for received, sent in producers(schedule).items())
    return tuple((sent, received) for sent, received in ends if sent[0] != received[0])
