"""A minimal benchmark of the look for NaN: all figures exist."""

import json
from pathlib import Path

import pytest

from recipes.benchmarks.nonfinite import main


@pytest.mark.thorough
def test_every_case_has_a_ratio(tmp_path: Path) -> None:
    data, table = tmp_path / "found.json", tmp_path / "found.md"
    sizes = ["--fits", "1", "--pairs", "1", "--blocks", "4", "--batch-size", "4", "--ranks", "1"]
    assert main([*sizes, "--json", str(data), "--table", str(table)]) == 0
    cases = json.loads(data.read_text())["cases"]
    assert [case["clip"] for case in cases] == [None, 1.0]
    assert all(0 < case["ratio"]["least"] <= case["cpu"]["most"] * 100 for case in cases)
    assert "| P | gradient_clip_val |" in table.read_text()
