"""A minimal single-process benchmark: both fits are equal bit for bit, and all figures exist.

two blocks, one sequence, two timed steps: correctness, not time
"""

import json
from functools import partial
from pathlib import Path

from recipes.benchmarks.single import main
from tests.harness.pool import Pool

SMALL = ["--rounds", "1", "--steps", "2", "--batch-size", "1", "--blocks", "2"]


def test_both_train_alike(pool: Pool, tmp_path: Path) -> None:
    data, table = tmp_path / "found.json", tmp_path / "found.md"
    assert pool.run(1, partial(main, [*SMALL, "--json", str(data), "--table", str(table)])) == [0]
    (case,) = json.loads(data.read_text())["cases"]
    assert case["equal"] is True
    assert case["our_step"]["median"] > 0 and case["plain_step"]["median"] > 0
    assert case["ratio"]["least"] <= case["ratio"]["median"] <= case["ratio"]["most"]
    assert "| 32-true |" in table.read_text() and "bit for bit equal" in table.read_text()


def test_a_missing_accelerator_is_rejected(pool: Pool) -> None:
    assert pool.run(1, partial(main, [*SMALL, "--accelerator", "abacus"])) == [2]
