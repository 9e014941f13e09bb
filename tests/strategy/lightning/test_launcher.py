"""A run starts only while all processes that this one has started still run, and says which were killed at its end."""

import os
import subprocess
import sys

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.monitor import processes
from lightning_hanayo.strategy.lightning import launcher
from lightning_hanayo.strategy.lightning.launcher import _Children
from tests.harness.limits import wait_until


def test_a_run_needs_all_processes() -> None:
    children = _Children()
    with children.running():
        assert children._is_running
    children._processes = [subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])]
    children._processes[0].wait()
    with pytest.raises(HanayoError, match=r"exit codes \[3\]. .* `except Exception`"), children.running():
        pass
    assert not children._is_running


def test_the_end_of_the_script_says_which_process_was_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    children = _Children()
    children._wait = 30.0
    children._processes = [subprocess.Popen(["sh", "-c", ending]) for ending in ("exit 0", "kill -9 $$")]
    children._end()
    assert capsys.readouterr().err == "rank 2 was killed (signal 9) after rank 0 had left the run\n"
    assert codes == [1]


def test_a_process_that_stays_stopped_is_named_and_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(launcher, "TO_SAY_WHO", 0.1)
    children = _Children()
    children._wait = 30.0
    children._processes = [subprocess.Popen(["sh", "-c", "kill -STOP $$"])]
    wait_until(lambda: processes.state(children._processes[0].pid) == "T", 10.0)
    children._end()
    said = "rank 1 is stopped (SIGSTOP or SIGTSTP) 0.1 s after rank 0 has ended its script; ending it\n"
    assert (capsys.readouterr().err, codes) == (said, [1])
