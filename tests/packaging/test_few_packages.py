"""The package, its strategy and the tests for GPUs need few other packages: a machine with GPUs may have no more."""

import sys
from pathlib import Path

import pytest

from tests.harness import limits

SCRIPT = """
import sys

sys.modules |= dict.fromkeys(("wandb", "jsonargparse", "importlinter", "tox"))  # None: an import fails

import pytest

sys.exit(pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", "-q", *sys.argv[1:]]))
"""


@pytest.mark.thorough
def test_tests_for_gpus_run_without_optional_packages() -> None:
    tests = ["-k", "cpu", "tests/gpu/test_single.py", "tests/gpu/test_threads.py"]
    done = limits.run([sys.executable, "-c", SCRIPT, *tests], 100, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
