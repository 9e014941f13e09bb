"""Records when each action of the last batches ran on this rank, and gathers a batch's records on pipeline rank 0.

rank 0   batch 50 | posts receives | batch 51 | waits for them: received long ago
rank 1   batch 50 | sends          | batch 51 |             |reached start end| of each action, in the table's order
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.clock import Clock, HostClock
from lightning_hanayo.runtime.comm.transport import Transport, Work
from lightning_hanayo.schedule import Action, Schedule

_TAG = (1 << 31) - 1
"""no message of a batch has this tag"""


@dataclass(slots=True)
class Event:
    """One action on this rank. Times are seconds of `time.perf_counter`, which processes on one machine share.

    On a GPU they are those of the device: it reaches an action, waits for its message, and ends it, while the host is
    ahead of it.
    """

    action: Action
    reached: float
    """when the rank got to the action, and began to wait for its message"""
    start: float
    """when its message was received"""
    end: float


BatchTrace = Sequence[Sequence[Event]]
"""One batch's events, one list for each pipeline rank."""


class RecordedBatch:
    """The actions of one batch, and a clock's marks: reached, start and end of each of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._actions: list[Action] = []
        self._marks: list[Any] = []

    def add(self, action: Action, reached: Any, start: Any, end: Any) -> None:
        """Record an action by its marks."""
        self._actions.append(action)
        self._marks += (reached, start, end)

    @cached_property
    def events(self) -> list[Event]:
        """When the actions ran. Waits until the device has run them: call it a batch later."""
        times = iter(self._clock.seconds(self._marks))
        self._marks = []
        return [Event(action, *three) for action, *three in zip(self._actions, times, times, times, strict=True)]


class Trace:
    """The last `keep` training batches, oldest first. Marks are made while a batch runs, and read when it is asked for.

    `clock` is that of the device that runs the batches.
    """

    def __init__(self, clock: Clock | None = None, keep: int = 16) -> None:
        self.clock = HostClock() if clock is None else clock
        self.recorded: deque[RecordedBatch] = deque(maxlen=keep)
        self._current = RecordedBatch(self.clock)

    @property
    def batches(self) -> list[list[Event]]:
        """The events of all batches that are kept. Waits until the device has run the last one."""
        return [batch.events for batch in self.recorded]

    def begin(self) -> None:
        """Start a batch."""
        self._current = RecordedBatch(self.clock)

    def add(self, action: Action, reached: Any, start: Any, end: Any) -> None:
        """Record an action by the clock's marks, in the order of the table."""
        self._current.add(action, reached, start, end)

    def end(self) -> None:
        """Keep the batch."""
        self.recorded.append(self._current)


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
