"""How a process is and how it ended, read from /proc and from its pidfd; seen by a monitor, and said."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from lightning_hanayo.monitor import processes
from lightning_hanayo.monitor.processes import Member
from tests.harness.limits import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the files are Linux's")
SLEEPS = (sys.executable, "-S", "-c", "import time; time.sleep(3600)")
ENDS: list[tuple[str, Callable[[int], None], str]] = [
    ("import time; time.sleep(3600)", lambda pid: os.kill(pid, signal.SIGKILL), "was killed (signal 9)"),
    ("import time; time.sleep(3600)", lambda pid: os.kill(pid, signal.SIGTERM), "was killed (signal 15, terminated)"),
    ("import os; os.kill(os.getpid(), 11)", lambda _: None, "was killed (signal 11, segmentation fault)"),
    ("raise SystemExit(3)", lambda _: None, "ended with exit code 3 without saying why"),
]


@pytest.mark.parametrize(("code", "end", "said"), ENDS, ids=[said for *_, said in ENDS])
def test_an_ended_process_is_described_before_it_is_collected(code: str, end: Callable[[int], None], said: str) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as process:
        pidfd = processes.open_pidfd(process.pid)
        end(process.pid)
        assert wait_until(lambda: processes.state(process.pid) == "Z", 20.0)
        assert processes.describe_end(processes.exit_status(process.pid, pidfd)) == said
        process.wait()
        collected = processes.exit_status(process.pid, pidfd)
        assert collected is None or processes.describe_end(collected) == said  # None before Linux 6.15
        if pidfd is not None:
            os.close(pidfd)


def test_nothing_is_made_up_about_a_process_that_nobody_has_seen_end() -> None:
    assert processes.describe_end(processes.exit_status(1 << 22, None)) == "ended without saying why"
    assert processes.open_pidfd(1 << 22) is None
    assert processes.started(1 << 22) == 0


def test_memory_that_was_full_is_a_hint() -> None:
    assert "ran out of memory" in processes.describe_end(9, memory_was_short=True)
    assert "memory" not in processes.describe_end(11, memory_was_short=True)
    assert processes.out_of_memory_kills() >= 0


def test_a_stopped_process_is_told_from_one_that_has_ended() -> None:
    with subprocess.Popen(SLEEPS) as process:
        member = Member(1, "pipeline 1", "", 0, process.pid, processes.started(process.pid), processes.host())
        assert member.exists and not member.is_stopped
        process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: member.is_stopped, 20.0)
        assert member.exists
        process.kill()
        assert wait_until(lambda: not member.exists, 20.0)
        assert not member.is_stopped


def test_another_process_with_the_same_number_is_no_member() -> None:
    earlier = Member(1, "pipeline 1", "", 0, os.getpid(), processes.started(os.getpid()) - 1, processes.host())
    assert not earlier.exists and not earlier.is_stopped
