"""A device's times are read when it has passed the marks, and lie as early as the host has recorded them.

host      0 mark   1 mark   2 mark          5 mark          recorded
device    |        |##########|##########|  |#####|
          0        1          3          5  5     6         passed: 0, 1, 3 and, after a pause, 5
"""

from collections.abc import Iterator

import pytest
import torch

from lightning_hanayo import clock as module
from lightning_hanayo.clock import EventClock, HostClock, clock_for


class Host:
    """A host whose time goes on only when a test says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Device:
    """Runs kernels in the order of their launch."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.busy_until = 0.0

    def launch(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.host.now) + seconds

    def event(self) -> "FakeEvent":
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.passed = max(self.device.busy_until, self.device.host.now)

    def synchronize(self) -> None:
        self.device.host.now = max(self.device.host.now, self.passed)

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        assert end_event.passed <= self.device.host.now, "the device has not passed it yet"
        return 1e3 * (end_event.passed - self.passed)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host()
    monkeypatch.setattr(module, "perf_counter", made.perf_counter)
    yield made


def test_times_are_those_of_the_device_and_not_of_the_launch(host: Host) -> None:
    device = Device(host)
    clock = EventClock(device.event)
    marks = [clock.mark()]
    for now, seconds in ((1.0, 2.0), (2.0, 2.0), (5.0, 1.0)):
        host.now = now
        marks.append(clock.mark())
        device.launch(seconds)
    host.now = 9.0
    assert clock.seconds(marks) == pytest.approx([0.0, 1.0, 3.0, 5.0])
    assert host.now == 9.0, "nothing to wait for"


def test_reading_waits_for_all_marks(host: Host) -> None:
    device = Device(host)
    clock = EventClock(device.event)
    marks = [clock.mark()]
    device.launch(4.0)
    marks.append(clock.mark())
    assert host.now == 0.0, "marking doesn't wait"
    assert clock.seconds(marks) == pytest.approx([0.0, 4.0])
    assert host.now == 4.0


def test_a_device_that_was_never_idle_is_too_early_by_the_least_lead_of_the_host(host: Host) -> None:
    device = Device(host)
    clock = EventClock(device.event)
    device.launch(3.0)
    first = clock.mark()
    device.launch(5.0)
    host.now = 1.0
    last = clock.mark()
    assert clock.seconds([first, last]) == pytest.approx([0.0, 5.0]), "it was at 3 and at 8"


def test_no_marks_have_no_times() -> None:
    assert EventClock(lambda: FakeEvent(Device(Host()))).seconds([]) == []


def test_the_host_keeps_its_own_times() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    marks = [clock.mark(), clock.mark()]
    assert clock.seconds(marks) == marks and marks[0] <= marks[1]
