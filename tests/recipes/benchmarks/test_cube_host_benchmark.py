"""A minimal benchmark of a block's host time: all figures exist, and the cube makes the collectives that it should."""

import json
from functools import partial
from pathlib import Path

from recipes.benchmarks.cube_host import main
from tests.harness.pool import Pool


def test_every_block_has_times_and_counts(pool: Pool, tmp_path: Path) -> None:
    data, table = tmp_path / "found.json", tmp_path / "found.md"
    arguments = ["--rounds", "1", "--calls", "1", "--json", str(data), "--table", str(table)]
    assert pool.run(1, partial(main, arguments)) == [0]
    blocks = json.loads(data.read_text())["blocks"]
    assert list(blocks)[:3] == ["plain", "DTensor", "cube (2, 2, 2)"]
    assert all(block["step"]["median"] > 0 for block in blocks.values())
    assert [blocks[name]["collectives"] for name in ("plain", "DTensor")] == [[0, 0], [8, 8]]
    assert blocks["cube (2, 2, 2)"]["collectives"] == [14, 14]
    assert "| cube (2, 2, 2) |" in table.read_text()
