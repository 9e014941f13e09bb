"""A process ends when the one that has started it is killed, whatever it does by then.

test    starts parent    starts child    which sleeps
        kills it                         is killed by Linux
"""

import subprocess
import sys

import psutil
import pytest

from lightning_hanayo.monitor.processes import command_ending_with_parent, lost_parent
from tests.harness.limits import wait_until
from tests.harness.pool import Pool

SLEEP = "import time; time.sleep(3600)"
STARTS = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(3600)"
ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="another system sends no such signal")


def child_of_killed_parent(code: str) -> psutil.Process:
    """Let a process start `python -c code`, which asks for its end first, and kill it."""
    own = "from lightning_hanayo.monitor.processes import command_ending_with_parent as of; "
    starts = STARTS.replace("sys.argv[1:]", "of(sys.argv[1:])")
    command = [sys.executable, "-c", own + starts, sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        child = psutil.Process(int(one.stdout.readline()))
        assert wait_until(lambda: SLEEP in child.cmdline() and "-I" not in child.cmdline(), 20.0)
        one.kill()
    return child


@ONLY_LINUX
def test_a_child_ends_with_its_killed_parent() -> None:
    child = child_of_killed_parent(SLEEP)
    assert wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 20.0)


@ONLY_LINUX
def test_a_child_whose_parent_has_ended_before_runs_nothing() -> None:
    command = command_ending_with_parent([sys.executable, "-c", "print('it runs')"])
    at = command.index("-c") + 2
    assert subprocess.check_output(command, text=True) == "it runs\n"
    command[at] = "1"
    assert subprocess.check_output(command, text=True) == ""


def test_elsewhere_the_command_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert command_ending_with_parent(["train"]) == ["train"]


def test_the_parent_of_a_fork_is_the_process_that_forked(pool: Pool) -> None:
    assert pool.run(1, lost_parent) == [None]  # forked by a process that has imported it, and has another parent
