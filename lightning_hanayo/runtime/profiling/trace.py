"""The trace: records when each action of the last batches ran on this rank, and how long it waited for its message."""

import time
from collections import deque
from dataclasses import dataclass, field

from lightning_hanayo.schedule import Action


@dataclass(slots=True)
class Event:
    """One action on this rank. Times are seconds of `time.perf_counter`, which processes on one machine share."""

    action: Action
    reached: float
    """when the engine got to the action, and began to wait for its message"""
    start: float
    """when its message was received"""
    end: float


@dataclass
class Trace:
    """The events of the last `keep` training batches, oldest first."""

    keep: int = 16
    batches: deque[list[Event]] = field(default_factory=deque)
    _current: list[Event] = field(default_factory=list)

    clock = staticmethod(time.perf_counter)

    def begin(self) -> None:
        """Start a batch."""
        self._current = []

    def add(self, action: Action, reached: float, start: float) -> None:
        """Record an action that ends now."""
        self._current.append(Event(action, reached, start, self.clock()))

    def end(self) -> None:
        """Keep the batch."""
        self.batches.append(self._current)
        while len(self.batches) > self.keep:
            self.batches.popleft()
