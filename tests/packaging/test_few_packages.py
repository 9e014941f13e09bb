"""The package, its strategy and the pool of the tests need few other packages: a machine with GPUs may have no more."""

import sys
from pathlib import Path

import pytest

from tests.harness import limits

SCRIPT = """
import sys

MISSING = ("wandb", "jsonargparse", "importlinter", "xdist", "tox")
sys.modules |= dict.fromkeys(MISSING)  # None: an import fails as if there were no such package
import tests.conftest, tests.gpu.conftest, tests.harness.fork_server
from tests.harness import models
from tests.harness.devices import train_on
from tests.harness.training import Layout
outcome = train_on("cpu", Layout(waves=2), models.MLP, models.vectors((8, 8)))
print(len(outcome.losses))
"""


@pytest.mark.thorough
def test_a_wave_trains_without_optional_packages() -> None:
    done = limits.run([sys.executable, "-c", SCRIPT], 100, cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines()[-1:] == ["2"], done.stderr
