"""Time limits that also hold on a machine that is busy with other work.

All limits of the suite are in scaled seconds: seconds of real time, divided by how many times slower than an idle
machine this one is at that moment.

    idle machine                       1 s of real time = 1    scaled second
    60 busy processes on 4 cores       1 s of real time = 0.07 scaled seconds

A slow machine therefore gets more time, and a test that hangs still ends, since real time counts at least 1/`MOST`.
A thread measures the slowness every two seconds, by the time that a fixed piece of work takes.
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
REMEMBERED = 3  # of so many measurements the slowest counts: a process that has slept is favoured by the scheduler
MOST = 64.0
NOISE = 1.5  # a machine that is slower by less counts as idle
IDLE_S = 0.025  # what `_work` takes on an idle core of a 2023 server
VARIABLE = "TEST_SLOWNESS"  # tells the processes that a test starts how slow the machine is
_TEXT = bytes(byte & 15 for byte in Random(0).randbytes(10 << 16))


def slowness() -> float:
    """How many times slower than an idle machine this one is now, 1 to `MOST`. Takes 25 ms on an idle one."""
    start = time.monotonic()
    _work()
    factor = (time.monotonic() - start) / IDLE_S
    return 1.0 if factor < NOISE else min(factor, MOST)


def _work() -> None:
    zlib.compress(_TEXT, 6)  # one call, without the interpreter's lock: this process's own threads hardly count


class Clock:
    """Counts scaled seconds, from the first time it is asked.

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
        self._recent: deque[float] = deque([1.0], maxlen=REMEMBERED)
        self._least, self.most = 1.0, 1.0
        self._stopped = threading.Event()

    @property
    def factor(self) -> float:
        """The slowness as measured in the last seconds."""
        self.start()
        return max(*self._recent, self._least)

    @contextmanager
    def at_least(self, factor: float) -> Iterator[None]:
        """Count the machine as no faster than that: for processes that were given time by an earlier measurement."""
        self.start()
        before, self._least = self._least, max(factor, self._least)
        try:
            yield
        finally:
            self._least = before

    def start(self) -> None:
        """Begin to measure, unless that has begun already."""
        with self._lock:
            if not self._moments:
                self._moments, self._counted = [self._real()], [0.0]
                threading.Thread(target=self._repeat, daemon=True, name="scaled-clock").start()

    def stop(self) -> None:
        """End the measurements."""
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
            known = min(beyond, 2 * PERIOD_S)  # a measurement that is late says that the machine is slow
            return self._counted[before] + known / max(*self._recent, self._least) + (beyond - known) / MOST

    def measure(self) -> None:
        """Measure the slowness, and count the time since the last measurement by it."""
        self._recent.append(self._measure())
        with self._lock:
            factor, moment = max(*self._recent, self._least), self._real()
            self._counted.append(self._counted[-1] + (moment - self._moments[-1]) / factor)
            self._moments.append(moment)
            self.most = max(factor, self.most)

    def _repeat(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self.measure()

    def summary(self) -> str:
        """A line for the suite's summary; empty if nothing was measured."""
        if len(self._moments) < 2:
            return ""
        mean = (self._moments[-1] - self._moments[0]) / self._counted[-1]
        return f"time limits were stretched {mean:.1f} times on average, {self.most:.1f} times at most"


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
        """Seconds of real time until it is worth looking again."""
        return max(0.02, self._end - self._clock.now())

    def at_most(self, seconds: float) -> "Deadline":
        """The earlier one: this deadline, or `seconds` scaled seconds from now."""
        other = Deadline(seconds, self._clock)
        return other if other._end < self._end else self


class Watchdog:
    """Calls `action` in a thread of its own once the time is up, unless cancelled before."""

    def __init__(self, seconds: float, action: Callable[[], object], name: str) -> None:
        self._deadline, self._action, self._cancelled = Deadline(seconds), action, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name=name)
        self._thread.start()

    def cancel(self) -> None:
        """Stop watching; returns when the thread has ended."""
        self._cancelled.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._deadline.over():
            if self._cancelled.wait(self._deadline.pause()):
                return
        self._action()


def real_seconds(seconds: float) -> float:
    """Scaled seconds from now as real ones, for code that takes a number. A `Deadline` is better where it can be used.

    The slowness may change until then, so leave a margin.
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


_OWN: dict[tuple[str, str], float] = {}  # the package's constants as they are


def stretch_grace() -> None:
    """In a process that a test has started: scale the time that the package gives ranks to end after a failure.

    Within these seconds a rank has to say why it failed. Call it before the strategy starts.
    """
    from lightning_hanayo.strategy import failure
    from lightning_hanayo.strategy.lightning import launcher

    factor = float(os.environ.get(VARIABLE, "1"))
    for module, name in ((failure, "GRACE"), (launcher, "GRACE"), (launcher, "KILL_AFTER")):
        own = _OWN.setdefault((module.__name__, name), getattr(module, name))
        setattr(module, name, own * factor)
