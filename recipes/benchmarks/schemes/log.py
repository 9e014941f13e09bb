"""A log of what one host does in a step, and the time that the step takes on an ideal network.

compute 20 ms | start 2 MB | compute 40 ms | wait        ->  20 + max(40, 2 MB / rate)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_hanayo.planner.block_time import Clock
from lightning_hanayo.schedule.cost import Segment


@dataclass(frozen=True)
class Event:
    """One entry.

    Args:
        kind: a computation, a collective's start, the wait for it, or the start of the backward.
        seconds: how long it computes.
        elements: how many are received.
        number: the collective's.
    """

    kind: Literal["compute", "start", "wait", "backward"]
    seconds: float = 0.0
    elements: float = 0.0
    number: int = 0


@dataclass
class Log:
    """The entries of one host."""

    events: list[Event] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    """when it computed, in seconds of the machine's monotonic clock"""
    _collectives: int = 0

    def compute(self, seconds: float) -> None:
        """A computation begins."""
        self.events.append(Event("compute", seconds=seconds))

    def start(self, elements: float) -> int:
        """A collective begins. Returns its number."""
        self._collectives += 1
        self.events.append(Event("start", elements=elements, number=self._collectives))
        return self._collectives

    def wait(self, number: int) -> None:
        """The collective's result is needed."""
        self.events.append(Event("wait", number=number))

    def backward(self) -> None:
        """The forward has ended."""
        self.events.append(Event("backward"))

    def clear(self) -> None:
        """Forget the step."""
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
        """Seconds if nothing overlapped."""
        return self.computing + self.receiving

    @property
    def bound(self) -> float:
        """Seconds if everything overlapped."""
        return max(self.computing, self.receiving)


def elements_of(events: Sequence[Event]) -> float:
    """Returns the elements received in the step."""
    return sum(event.elements for event in events)


def segments_of(events: Sequence[Event], elements_per_second: float) -> tuple[list[Segment], list[Segment]]:
    """A step's forward and its backward, as the simulation of pairs takes them.

    What a backward waits for at its end, weights' gradients, may end while the next action runs.
    """
    parts: list[list[Segment]] = [[], []]
    numbers: dict[int, int] = {}
    part, computed = 0, 0.0
    for event in events:
        match event.kind:
            case "compute":
                computed += event.seconds
                continue
            case "start":
                numbers[event.number] = sum(one.start is not None for one in parts[part])
                parts[part].append(Segment(computed, start=event.elements / elements_per_second))
            case "wait":
                parts[part].append(Segment(computed, wait=numbers[event.number]))
            case "backward":
                parts[part].append(Segment(computed))
                part = 1
        computed = 0.0
    parts[part].append(Segment(computed))
    while parts[1] and not parts[1][-1].compute and parts[1][-1].start is None:
        parts[1].pop()
    return parts[0], parts[1]


def replay(events: Sequence[Event], elements_per_second: float) -> Replay:
    """Replay a step. Collectives use the link one after the other, in the order of their starts."""
    clock, forward = Clock(), 0.0
    ends: dict[int, float] = {}
    for event in events:
        match event.kind:
            case "compute":
                clock.compute(event.seconds)
            case "start":
                ends[event.number] = clock.start(event.elements / elements_per_second)
            case "wait":
                clock.wait(ends[event.number])
            case "backward":
                forward = clock.now
    return Replay(forward, clock.now, clock.computing, clock.receiving)
