"""Imports: schedules and plots load no torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["lightning_hanayo.schedule", "lightning_hanayo.plotting"])
def test_neither_torch_nor_lightning_is_loaded(name: str) -> None:
    code = f"import sys, {name}; print([m for m in ('torch', 'lightning', 'numpy', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
