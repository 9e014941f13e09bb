"""A minimal benchmark of random streams: all figures exist."""

import json
from functools import partial
from pathlib import Path

from recipes.benchmarks.random_streams import main
from tests.harness.pool import Pool


def test_every_case_has_a_time(pool: Pool, tmp_path: Path) -> None:
    data, table = tmp_path / "found.json", tmp_path / "found.md"
    arguments = ["--rounds", "1", "--calls", "2", "--json", str(data), "--table", str(table)]
    assert pool.run(1, partial(main, arguments)) == [0]
    cases = json.loads(data.read_text())["cases"]
    assert len(cases) == 7 and all(0 < case["least"] <= case["us"] <= case["most"] for case in cases.values())
    assert "| a block of a stage |" in table.read_text()
