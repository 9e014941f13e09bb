"""The log: what one host does in a step, in order; from it a step's time on an ideal network can be told.

compute 20 ms | start 2 MB | compute 40 ms | wait        ->  20 + max(40, 2 MB / rate)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Event:
    """One of them.

    Args:
        kind: a computation; a collective's start, or the wait for it; the backward's begin.
        seconds: that it computes.
        elements: that come from others.
        number: which collective.
    """

    kind: Literal["compute", "start", "wait", "backward"]
    seconds: float = 0.0
    elements: float = 0.0
    number: int = 0


@dataclass
class Log:
    """Of one host, while it is kept."""

    events: list[Event] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    """when it really computed, in seconds of the machine's monotonic clock"""
    _collectives: int = 0

    def compute(self, seconds: float) -> None:
        """A computation begins."""
        self.events.append(Event("compute", seconds=seconds))

    def start(self, elements: float) -> int:
        """A collective begins; its number."""
        self._collectives += 1
        self.events.append(Event("start", elements=elements, number=self._collectives))
        return self._collectives

    def wait(self, number: int) -> None:
        """Its result is needed."""
        self.events.append(Event("wait", number=number))

    def backward(self) -> None:
        """The forward has ended."""
        self.events.append(Event("backward"))

    def clear(self) -> None:
        """Before another step."""
        self.events.clear()
        self.spans.clear()


@dataclass(frozen=True)
class Replay:
    """A step on a network without latency, all of whose hosts do the same at the same time. Seconds."""

    forward: float
    step: float
    computing: float
    receiving: float
    """what the link needs for all of it"""

    @property
    def apart(self) -> float:
        """If nothing overlapped."""
        return self.computing + self.receiving

    @property
    def bound(self) -> float:
        """If all overlapped."""
        return max(self.computing, self.receiving)


def elements_of(events: Sequence[Event]) -> float:
    """Received in the step."""
    return sum(event.elements for event in events)


def replay(events: Sequence[Event], elements_per_second: float) -> Replay:
    """Collectives use the link one after the other, in the order of their starts."""
    now = free = forward = 0.0
    ends: dict[int, float] = {}
    for event in events:
        match event.kind:
            case "compute":
                now += event.seconds
            case "start":
                free = ends[event.number] = max(now, free) + event.elements / elements_per_second
            case "wait":
                now = max(now, ends[event.number])
            case "backward":
                forward = now
    computing = sum(event.seconds for event in events)
    return Replay(forward, now, computing, elements_of(events) / elements_per_second)
