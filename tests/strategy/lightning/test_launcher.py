"""A run starts only while all processes that this one has started still run."""

import subprocess
import sys

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy.lightning.launcher import _Children


def test_a_run_needs_all_processes() -> None:
    children = _Children()
    with children.running():
        assert children._is_running
    children._processes = [subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])]
    children._processes[0].wait()
    with pytest.raises(HanayoError, match=r"exit codes \[3\]. .* `except Exception`"), children.running():
        pass
    assert not children._is_running
