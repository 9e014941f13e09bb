"""Records when each action of the last batches ran on this rank, and gathers a batch's records on pipeline rank 0.

rank 0   batch 50 | posts receives | batch 51 | waits for them: received long ago
rank 1   batch 50 | sends          | batch 51 |             |reached start end| of each action, in the table's order
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hanayo.runtime.comm.transport import Transport, Work
from lightning_hanayo.schedule import Action, Schedule

_TAG = (1 << 31) - 1
"""no message of a batch has this tag"""


@dataclass(slots=True)
class Event:
    """One action on this rank. Times are seconds of `time.perf_counter`, which processes on one machine share."""

    action: Action
    reached: float
    """when the engine got to the action, and began to wait for its message"""
    start: float
    """when its message was received"""
    end: float


BatchTrace = Sequence[Sequence[Event]]
"""One batch's events, one list for each pipeline rank."""


class Trace:
    """The events of the last `keep` training batches, oldest first."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, keep: int = 16) -> None:
        self.batches: deque[list[Event]] = deque(maxlen=keep)
        self._current: list[Event] = []

    def begin(self) -> None:
        """Start a batch."""
        self._current = []

    def add(self, action: Action, reached: float, start: float) -> None:
        """Record an action that ends now."""
        self._current.append(Event(action, reached, start, self.clock()))

    def end(self) -> None:
        """Keep the batch."""
        self.batches.append(self._current)


@dataclass
class TraceGather:
    """Gathers traces on rank 0. All ranks of the pipeline call `start` for the same batches, then `finish`.

    `table` returns the schedule of a batch of that many micro-batches, which gives each rank's order of events.
    """

    transport: Transport
    table: Callable[[int], Schedule]
    _transfers: Sequence[tuple[Tensor, Work]] = ()
    _own: Sequence[Event] = ()

    def start(self, events: Sequence[Event]) -> None:
        """Start to send this rank's events of a batch; on rank 0, start to receive the others'. Does not wait."""
        self._own = events
        if self.transport.rank > 0:
            buffer = pack(events)
            self._transfers = [(buffer, self.transport.send(0, _TAG, buffer))]
            return
        rows = self.table(num_microbatches(events)).actions
        buffers = [torch.empty(3 * len(row), dtype=torch.float64) for row in rows[1:]]
        self._transfers = [(b, self.transport.receive(rank, _TAG, b)) for rank, b in enumerate(buffers, 1)]

    def finish(self) -> BatchTrace | None:
        """Wait, and return the events of all ranks on rank 0; None on other ranks, or if nothing was started."""
        own, transfers = self._own, self._transfers
        self.forget()
        for _, work in transfers:
            work.wait()
        if not own or self.transport.rank > 0:
            return None
        rows = self.table(num_microbatches(own)).actions[1:]
        return [own, *(unpack(row, buffer) for row, (buffer, _) in zip(rows, transfers, strict=True))]

    def forget(self) -> None:
        """Drop what is under way, after a failure."""
        self._own = self._transfers = ()


def pack(events: Sequence[Event]) -> Tensor:
    """Return the times: [3 * events], float64. The actions are those of the table."""
    return torch.tensor([(e.reached, e.start, e.end) for e in events], dtype=torch.float64).flatten()


def unpack(actions: Sequence[Action], times: Tensor) -> list[Event]:
    """Return the events that `pack` was given."""
    return [Event(action, *three) for action, three in zip(actions, times.view(-1, 3).tolist(), strict=True)]


def num_microbatches(events: Sequence[Event]) -> int:
    """Return the number of micro-batches of a batch, from one rank's events: every rank works on each of them."""
    return 1 + max(event.action.microbatch or 0 for event in events)
