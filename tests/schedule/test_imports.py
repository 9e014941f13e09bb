"""Importing schedules and plots loads no torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["lightning_hanayo.schedule", "lightning_hanayo.plotting"])
def test_neither_torch_nor_lightning_is_loaded(package: str) -> None:
    code = (
        f"import sys, {package}; print([m for m in ('torch', 'lightning', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
