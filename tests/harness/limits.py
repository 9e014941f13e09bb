"""Scales time limits by how slow the machine is at the moment, so that they hold on a busy machine, too.

All limits of the suite are in scaled seconds: real time divided by how many times slower than an idle machine this one
is at that moment.

    idle machine                       1 s of real time = 1    scaled second
    60 busy processes on 4 cores       1 s of real time = 0.07 scaled seconds

A test that hangs still ends, because a second of real time counts as at least 1/`MAX_SLOWNESS` scaled seconds. A thread
measures the slowness every two seconds, as the time that a fixed piece of work takes.
"""

import os
import subprocess
import threading
import time
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

PERIOD_S = 2.0
NUM_RECENT = 3  # the slowest of the last ones counts: the scheduler favours a process that has slept
MAX_SLOWNESS = 64.0
NOISE = 1.5  # a smaller slowness counts as 1
IDLE_S = 0.01  # the time of `_work` on an idle core of a 2023 server
VARIABLE = "TEST_SLOWNESS"  # passes the slowness to processes that a test starts
_TEXT = bytes(byte & 15 for byte in Random(0).randbytes(4 << 16))


def slowness() -> float:
    """How many times slower than an idle machine this one is now, 1 to `MAX_SLOWNESS`. Takes 10 ms on an idle one."""
    start = time.monotonic()
    _work()
    factor = (time.monotonic() - start) / IDLE_S
    return 1.0 if factor < NOISE else min(factor, MAX_SLOWNESS)


def _work() -> None:
    zlib.compress(_TEXT, 6)  # releases the interpreter's lock, so that this process's own threads hardly matter


class Clock:
    """Counts scaled seconds since its first use.

    Example:
        >>> start = CLOCK.now()
        >>> time.sleep(0.5)
        >>> round(CLOCK.now() - start, 1)  # on an idle machine; less on a busy one
        0.5
    """

    def __init__(self, measure: Callable[[], float] = slowness, real: Callable[[], float] = time.monotonic) -> None:
        self._measure, self._real = measure, real
        self._lock = threading.Lock()
        self._moments: list[float] = []  # real time of each measurement
        self._counted: list[float] = []  # scaled seconds until then
        self._recent: deque[float] = deque([1.0], maxlen=NUM_RECENT)
        self._least, self.max_factor = 1.0, 1.0
        self._stopped = threading.Event()

    @property
    def factor(self) -> float:
        """The slowness, as measured in the last seconds."""
        self.start()
        return max(*self._recent, self._least)

    @contextmanager
    def at_least(self, factor: float) -> Iterator[None]:
        """Assume at least this slowness: for processes whose limits were scaled by an earlier measurement."""
        self.start()
        before, self._least = self._least, max(factor, self._least)
        try:
            yield
        finally:
            self._least = before

    def start(self) -> None:
        """Start the measurements, unless they have started."""
        with self._lock:
            if not self._moments:
                self._moments, self._counted = [self._real()], [0.0]
                threading.Thread(target=self._repeat, daemon=True, name="scaled-clock").start()

    def stop(self) -> None:
        """Stop the measurements."""
        self._stopped.set()

    def now(self) -> float:
        """Scaled seconds until now."""
        self.start()
        return self.at(self._real())

    def at(self, moment: float) -> float:
        """Scaled seconds until `moment`, a value of `time.monotonic`."""
        with self._lock:
            after = bisect_right(self._moments, moment)
            before = max(after - 1, 0)
            beyond = max(moment - self._moments[before], 0.0)
            if after < len(self._moments):
                share = beyond / (self._moments[after] - self._moments[before])
                return self._counted[before] + share * (self._counted[after] - self._counted[before])
            known = min(beyond, 2 * PERIOD_S)  # a late measurement means that the machine is slow
            return self._counted[before] + known / max(*self._recent, self._least) + (beyond - known) / MAX_SLOWNESS

    def measure(self) -> None:
        """Measure the slowness, and scale the time since the last measurement by it."""
        self._recent.append(self._measure())
        with self._lock:
            factor, moment = max(*self._recent, self._least), self._real()
            self._counted.append(self._counted[-1] + (moment - self._moments[-1]) / factor)
            self._moments.append(moment)
            self.max_factor = max(factor, self.max_factor)

    def _repeat(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self.measure()

    def summary(self) -> str:
        """A line for the suite's summary; empty if nothing was measured."""
        if len(self._moments) < 2:
            return ""
        mean = (self._moments[-1] - self._moments[0]) / self._counted[-1]
        return f"time limits were stretched {mean:.1f} times on average, {self.max_factor:.1f} times at most"


CLOCK = Clock()


class Deadline:
    """The moment `seconds` scaled seconds from now.

    Example:
        >>> deadline = Deadline(10.0)
        >>> while not ready(deadline.pause()) and not deadline.over():
        ...     pass
    """

    def __init__(self, seconds: float, clock: Clock | None = None) -> None:
        self._clock = clock or CLOCK
        self._end = self._clock.now() + seconds

    def over(self) -> bool:
        """Whether the time is up."""
        return self._clock.now() >= self._end

    def pause(self) -> float:
        """Seconds of real time to wait before the next check."""
        return max(0.02, self._end - self._clock.now())

    def at_most(self, seconds: float) -> "Deadline":
        """The earlier one: this deadline, or `seconds` scaled seconds from now."""
        other = Deadline(seconds, self._clock)
        return other if other._end < self._end else self


class Watchdog:
    """Calls `action` in a separate thread after `seconds` scaled seconds, unless it is cancelled before."""

    def __init__(self, seconds: float, action: Callable[[], object], name: str) -> None:
        self._deadline, self._action, self._cancelled = Deadline(seconds), action, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name=name)
        self._thread.start()

    def cancel(self) -> None:
        """Cancel the action; returns when the thread has ended."""
        self._cancelled.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._deadline.over():
            if self._cancelled.wait(self._deadline.pause()):
                return
        self._action()


def real_seconds(seconds: float) -> float:
    """Converts scaled seconds to real ones, for code that takes a number. Use a `Deadline` where possible.

    The slowness may change in the meantime, so leave a margin.
    """
    return seconds * CLOCK.factor


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds, for at most `seconds` scaled seconds; return whether it does."""
    deadline = Deadline(seconds)
    while not condition():
        if deadline.over():
            return False
        time.sleep(0.01)
    return True


def run(command: Sequence[Any] | str, seconds: float = 60.0, **options: Any) -> "subprocess.CompletedProcess[str]":
    """`subprocess.run` with its output captured as text, and a limit in scaled seconds.

    Raises:
        subprocess.TimeoutExpired: the command took longer, and was killed.
    """
    deadline = Deadline(seconds)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **options) as process:
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=deadline.pause())
                    return subprocess.CompletedProcess(command, process.returncode, output, errors)
                except subprocess.TimeoutExpired:
                    if deadline.over():
                        raise
        except BaseException:
            process.kill()
            raise


_OWN: dict[tuple[str, str], float] = {}  # the original values of the package's constants


def stretch_grace() -> None:
    """Scale the time that the package gives ranks to end after a failure, in a process that a test has started.

    Within that time a failed rank must report its cause. Call it before the strategy starts.
    """
    from lightning_hanayo.strategy import failure
    from lightning_hanayo.strategy.lightning import launcher

    factor = float(os.environ.get(VARIABLE, "1"))
    for module, name in ((failure, "GRACE"), (launcher, "GRACE"), (launcher, "KILL_AFTER")):
        own = _OWN.setdefault((module.__name__, name), getattr(module, name))
        setattr(module, name, own * factor)
