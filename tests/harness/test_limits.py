"""Time limits are scaled by the slowness of the machine, and end tests that hang.

real time            0         10        20        30
slowness             |    1    |    5    |    1    |
scaled seconds       0         10        12        22
"""

import subprocess
import sys
import threading
import time

import pytest

from tests.harness import limits
from tests.harness.limits import MAX_SLOWNESS, PERIOD_S, Clock, Deadline, Watchdog


class Machine:
    """A machine whose time and slowness the test sets."""

    def __init__(self) -> None:
        self.time, self.slowness = 100.0, 1.0
        self.clock = Clock(lambda: self.slowness, lambda: self.time)
        self.clock.stop()  # measures only when the test calls it
        self.start = self.clock.now()

    def spend(self, seconds: float, slowness: float) -> float:
        """Scaled seconds since the start after some more of real time."""
        self.time, self.slowness = self.time + seconds, slowness
        self.clock._recent.clear()
        self.clock.measure()
        return self.clock.now() - self.start


def test_real_time_is_divided_by_the_slowness() -> None:
    machine = Machine()
    assert [machine.spend(10, 1.0), machine.spend(10, 5.0), machine.spend(10, 1.0)] == pytest.approx([10, 12, 22])
    assert [machine.clock.at(100 + moment) for moment in (5, 15, 30)] == pytest.approx([5, 11, 22])
    assert "1.4 times on average, 5.0 times at most" in machine.clock.summary()


def test_a_late_measurement_counts_as_the_largest_slowness() -> None:
    machine = Machine()
    machine.time += 2 * PERIOD_S + MAX_SLOWNESS
    assert machine.clock.now() - machine.start == pytest.approx(2 * PERIOD_S + 1)


def test_one_fast_measurement_changes_nothing() -> None:
    machine = Machine()
    machine.spend(10, 5.0)
    machine.time, machine.slowness = machine.time + 10, 1.0
    machine.clock.measure()
    assert machine.clock.now() - machine.start == pytest.approx(4)


def test_at_least_sets_a_minimum_slowness() -> None:
    machine = Machine()
    with machine.clock.at_least(5.0):
        assert machine.spend(10, 1.0) == pytest.approx(2)
        assert machine.spend(10, 10.0) == pytest.approx(3)
    assert machine.spend(10, 1.0) == pytest.approx(13)


def test_a_deadline_is_in_scaled_seconds() -> None:
    machine = Machine()
    deadline = Deadline(20.0, machine.clock)
    sooner = deadline.at_most(11.0)
    assert deadline.at_most(30.0) is deadline
    machine.spend(10, 1.0)
    machine.spend(10, 5.0)
    assert sooner.over() and not deadline.over()
    assert deadline.pause() == pytest.approx(8)
    machine.spend(8, 1.0)
    assert deadline.over()


def test_slowness_is_at_least_one_and_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IDLE_S", 1e9)
    assert limits.slowness() == 1.0
    monkeypatch.setattr(limits, "IDLE_S", 1e-9)
    assert limits.slowness() == MAX_SLOWNESS


def test_a_watchdog_acts_after_its_time() -> None:
    acted = threading.Event()
    watchdog = Watchdog(0.05, acted.set, "too late")
    assert acted.wait(60)
    watchdog.cancel()


def test_a_cancelled_watchdog_does_nothing() -> None:
    acted = threading.Event()
    Watchdog(3600, acted.set, "in time").cancel()
    assert not acted.is_set()


def test_a_command_that_hangs_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        limits.run([sys.executable, "-c", "import time; time.sleep(3600)"], 0.1)


def test_a_command_may_run_longer_than_one_wait() -> None:
    code = "import sys, time; print('out'); time.sleep(0.1); print('err', file=sys.stderr); sys.exit(3)"
    done = limits.run([sys.executable, "-c", code])
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_waiting_ends_with_the_condition_or_the_time() -> None:
    start = time.monotonic()
    assert limits.wait_until(lambda: time.monotonic() > start, 60)
    assert not limits.wait_until(lambda: False, 0.05)
