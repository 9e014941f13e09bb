"""Clocks: mark points in the work of a rank, and say later when they were passed. On GPUs the device passes them.

host     | mark, launch, mark, launch, mark |  is far ahead
device         ...      |mark   kernels   |mark   kernels   |mark          its times are read when all are passed
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter  # by name: tests of users' code replace the one in `time`
from typing import Any, NamedTuple

import torch
from typing_extensions import override


class Clock(ABC):
    """Marks points of time, which are read later. All marks of one call of `seconds` are of one thread and stream."""

    @abstractmethod
    def mark(self) -> Any:
        """Mark the point that this rank's work has now reached. Never waits."""

    @abstractmethod
    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When these marks, in their order, were passed: seconds on the axis of `time.perf_counter`.

        Waits until all of them are passed.
        """


class HostClock(Clock):
    """For work that is done when its call returns."""

    mark = staticmethod(perf_counter)  # no frame of its own: each action is marked three times

    @override
    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class DeviceMark(NamedTuple):
    """An event, and the host's time when it was put into the stream."""

    event: Any
    """as `torch.cuda.Event(enable_timing=True)`"""
    recorded: float


class EventClock(Clock):
    """For work that a device does later: marks are events in the current stream.

    A device tells only the time between events. No event passes before the host has recorded it, so the offset of the
    device's axis is at least `recorded - elapsed` of each event; the largest one is taken. It is exact if the device
    was idle once in between, as it is in a pipeline where it waits for another rank. Where it never was, all times are
    too early by the least time that the host was ahead. Differences between times are the device's own.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event

    @override
    def mark(self) -> DeviceMark:
        event, recorded = self._make_event(), perf_counter()
        event.record()
        return DeviceMark(event, recorded)

    @override
    def seconds(self, marks: Sequence[DeviceMark]) -> list[float]:
        for mark in marks:
            mark.event.synchronize()
        elapsed = [marks[0].event.elapsed_time(mark.event) / 1e3 for mark in marks]
        offset = max((mark.recorded - one for mark, one in zip(marks, elapsed, strict=True)), default=0.0)
        return [offset + one for one in elapsed]


def clock_for(device: torch.device) -> Clock:
    """The clock for work on a device."""
    if device.type == "cpu":
        return HostClock()
    module = torch.get_device_module(device)
    return EventClock(lambda: module.Event(enable_timing=True))
