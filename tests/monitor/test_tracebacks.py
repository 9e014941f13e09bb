"""The stack of a process that holds Python's lock can be read by another one; one that has no file gets no signal."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_hanayo.monitor.hangs import tracebacks
from tests.harness.limits import wait_until

HOLDS_LOCK = """
import ctypes
from lightning_hanayo.monitor.hangs import tracebacks
assert tracebacks.let_others_read()
def hold():
    print("holding", flush=True)
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(600)
hold()
"""
AFTER_A_RUN = """
import signal
from lightning_hanayo.monitor.hangs import tracebacks
assert tracebacks.let_others_read()
number, _ = tracebacks._file()
signal.signal(number, signal.getsignal(number))  # what a Trainer does to all signals when it ends
if begins_another:
    assert tracebacks.let_others_read()
print("sleeping", flush=True)
while True:
    signal.pause()
"""
SLEEPS = "print('sleeping', flush=True); import time; time.sleep(600)"


@contextmanager
def process(code: str) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started
        started.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_holds_the_lock_is_read() -> None:
    with process(HOLDS_LOCK) as holding:
        for _ in range(2):
            assert tracebacks.request_stack(holding.pid)
            assert wait_until(lambda: tracebacks.read_stack(holding.pid) is not None, 10.0)
            line = tracebacks.read_stack(holding.pid)
        assert line == ("<string>", 8, "hold")
        assert holding.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_without_a_file_gets_no_signal() -> None:
    with process(SLEEPS) as sleeping:
        assert not tracebacks.request_stack(sleeping.pid)
        assert tracebacks.read_stack(sleeping.pid) is None
        assert sleeping.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("begins_another", [False, True])
def test_a_process_can_be_read_in_each_of_its_runs_and_gets_no_signal_after_them(begins_another: bool) -> None:
    with process(f"begins_another = {begins_another}{AFTER_A_RUN}") as running:
        assert tracebacks.request_stack(running.pid) is begins_another
        if begins_another:
            assert wait_until(lambda: tracebacks.read_stack(running.pid) is not None, 10.0)
        assert running.poll() is None


STEP = """Thread 0x00007f01 (most recent call first):
  File "/a/suspended_call.py", line 70 in suspend
  File "/a/model.py", line 5 in training_step
  File "/a/suspended_call.py", line 96 in _work

Thread 0x00007f02 (most recent call first):
  File "/a/model.py", line 9 in training_step
  File "/a/suspended_call.py", line 96 in _work

Current thread 0x00007f03 (most recent call first):
  File "/a/suspended_call.py", line 90 in _wait
  File "/a/script.py", line 3 in <module>
"""


def test_the_stack_of_the_step_that_runs_counts() -> None:
    assert tracebacks._line_in(STEP) == ("/a/model.py", 9, "training_step")
    assert tracebacks._line_in("") is None
