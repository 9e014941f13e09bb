"""Strangers at a monitor's port do no harm; ranks in other processes are seen when they are killed or stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_hanayo.monitor.monitor import Monitor
from lightning_hanayo.monitor.overlay import LONGEST_LINE, MOST_STRANGERS
from lightning_hanayo.monitor.processes import Member
from tests.harness.limits import Deadline, wait_until
from tests.harness.monitors import QUICK, Worlds

ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")
OTHER_RANK = """
import dataclasses, json, sys
from lightning_hanayo.monitor.processes import Member
from lightning_hanayo.monitor.monitor import Monitor
monitor = Monitor(1, 2, "pipeline 1", "127.0.0.1")
print(json.dumps(dataclasses.asdict(monitor.member)), flush=True)
monitor.connect([Member(**json.loads(sys.stdin.readline())), monitor.member], "a secret")
monitor.decide("linked", True)
{then}
sys.stdin.readline()
"""


@contextmanager
def other_rank(then: str = "") -> Iterator[tuple[Monitor, "subprocess.Popen[str]"]]:
    """This process's monitor, and the process of rank 1, which ends when its input does."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", OTHER_RANK.format(then=then)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as process:  # type: ignore[call-overload]
        monitor = Monitor(0, 2, "pipeline 0", "127.0.0.1", QUICK)
        try:
            member = Member(**json.loads(process.stdout.readline()))
            process.stdin.write(json.dumps(asdict(monitor.member)) + "\n")
            process.stdin.flush()
            monitor.connect([monitor.member, member], "a secret")
            assert monitor.verdict("linked", wait=30.0)
            yield monitor, process
        finally:
            process.kill()
            monitor.close()


def closes(stranger: socket.socket) -> bool:
    """Whether the other side closes it, after its own hello."""
    deadline = Deadline(20.0)
    stranger.settimeout(0.1)
    while not deadline.over():
        try:
            if not stranger.recv(4096):
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\n",
        b"[1, 2]\n",
        b"[" * 400 + b"\n",
        b'{"token": "a guess", "rank": 1}\n',
        b'{"token": "a secret", "rank": 7}\n',
        b'{"token": "a secret", "rank": [1]}\n',
        b"x" * (LONGEST_LINE + 1),
    ],
)
def test_strangers_are_sent_away(world: Worlds, garbage: bytes) -> None:
    first, second = world(2)
    assert second.decide("before", 1) == 1
    with socket.create_connection(("127.0.0.1", first.member.port)) as stranger:
        stranger.sendall(garbage)
        assert closes(stranger)
    assert second.decide("after", 1) == 1


def test_strangers_that_say_nothing_are_few(world: Worlds) -> None:
    first, second = world(2)
    silent = [socket.create_connection(("127.0.0.1", first.member.port)) for _ in range(MOST_STRANGERS + 5)]
    assert second.decide("with them", 1) == 1
    assert all(map(closes, silent[:5]))
    for stranger in silent:
        stranger.close()


@ONLY_LINUX
def test_a_killed_process_is_seen() -> None:
    with other_rank() as (monitor, process):
        process.kill()
        assert wait_until(lambda: monitor.state_of(1) == "ended", 20.0)
        assert monitor.peer(1).reason == "was killed (signal 9)"


@ONLY_LINUX
def test_a_stopped_process_is_seen_and_may_go_on() -> None:
    with other_rank() as (monitor, process):
        process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: monitor.state_of(1) == "stopped", 20.0)
        assert monitor.ask("who", timeout=0.01) == {} and monitor.arbiter == 0
        process.send_signal(signal.SIGCONT)
        assert wait_until(lambda: monitor.state_of(1) == "running", 20.0)


@ONLY_LINUX
def test_a_process_that_ends_says_goodbye() -> None:
    with other_rank() as (monitor, process):
        process.stdin.close()  # type: ignore[union-attr]
        assert wait_until(lambda: monitor.state_of(1) == "ended", 20.0)
        assert "killed" not in monitor.peer(1).reason


@ONLY_LINUX
def test_a_forked_process_keeps_no_link_open() -> None:
    forks = "import os; os.fork() or __import__('time').sleep(3600)"
    with other_rank(forks) as (monitor, process):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        assert wait_until(lambda: bool(children.read_text()), 20.0)
        child = int(children.read_text())
        try:
            process.kill()
            assert wait_until(lambda: not monitor._overlay._links, 20.0)
        finally:
            os.kill(child, signal.SIGKILL)
