"""Minimal runs of the benchmarks of one process: all figures exist, and what should be equal is.

two blocks, one sequence, two timed steps: correctness, not time
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recipes.benchmarks import cube_host, large_blocks, nonfinite, random_streams, single, step_once
from tests.harness.pool import Pool

SMALL = ["--rounds", "1", "--steps", "2", "--batch-size", "1", "--blocks", "2"]


def found_by(
    main: Callable[[list[str]], int], arguments: list[str], folder: Path, pool: Pool | None
) -> tuple[dict[str, Any], str]:
    """The figures and the page."""
    data, page = folder / "found.json", folder / "found.md"
    call = partial(main, [*arguments, "--json", str(data), "--table", str(page)])
    assert call() == 0 if pool is None else pool.run(1, call) == [0]
    return json.loads(data.read_text()), page.read_text()


def test_one_process_trains_alike_under_both_strategies(pool: Pool, tmp_path: Path) -> None:
    data, page = found_by(single.main, SMALL, tmp_path, pool)
    (case,) = data["cases"]
    assert case["equal"] is True
    assert case["our_step"]["median"] > 0 and case["plain_step"]["median"] > 0
    assert case["ratio"]["least"] <= case["ratio"]["median"] <= case["ratio"]["most"]
    assert "| 32-true |" in page and "bit for bit equal" in page


def test_a_missing_accelerator_is_rejected(pool: Pool) -> None:
    assert pool.run(1, partial(single.main, [*SMALL, "--accelerator", "abacus"])) == [2]


def test_every_block_has_host_times_and_the_collectives_that_it_should(pool: Pool, tmp_path: Path) -> None:
    data, page = found_by(cube_host.main, ["--rounds", "1", "--calls", "1"], tmp_path, pool)
    blocks = data["blocks"]
    assert list(blocks)[:3] == ["plain", "DTensor", "cube (2, 2, 2)"]
    assert all(block["step"]["median"] > 0 for block in blocks.values())
    assert [blocks[name]["collectives"] for name in ("plain", "DTensor")] == [[0, 0], [8, 8]]
    assert blocks["cube (2, 2, 2)"]["collectives"] == [14, 14]
    assert "| cube (2, 2, 2) |" in page


def test_every_random_stream_has_a_time(pool: Pool, tmp_path: Path) -> None:
    data, page = found_by(random_streams.main, ["--rounds", "1", "--calls", "2"], tmp_path, pool)
    cases = data["cases"]
    assert len(cases) == 7 and all(0 < case["least"] <= case["us"] <= case["most"] for case in cases.values())
    assert "| a block of a stage |" in page


@pytest.mark.thorough
def test_steps_once_and_for_each_micro_batch_have_times(tmp_path: Path) -> None:
    data, page = found_by(step_once.main, ["--microbatches", "2", "--forward-ms", "1", "--steps", "1"], tmp_path, None)
    assert len(data["rows"]) == 13 and all(row["step"]["median"] > 0 < row["activations"] <= 2 for row in data["rows"])
    assert data["probe"]["probe"] > 0 and "| hanayo W=1, step once |" in page


@pytest.mark.thorough
def test_looking_for_nan_has_a_ratio(tmp_path: Path) -> None:
    sizes = ["--fits", "1", "--pairs", "1", "--blocks", "4", "--batch-size", "4", "--ranks", "1"]
    data, page = found_by(nonfinite.main, sizes, tmp_path, None)
    assert [case["clip"] for case in data["cases"]] == [None, 1.0]
    assert all(0 < case["ratio"]["least"] <= case["cpu"]["most"] * 100 for case in data["cases"])
    assert "| P | gradient_clip_val |" in page


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b"])
def test_blocks_of_large_models_have_times_and_plans(tmp_path: Path, model: str) -> None:
    arguments = ["--toy", "--rounds", "1", "--models", model]
    data, page = found_by(large_blocks.main, arguments, tmp_path, None)
    assert data["failed"] == {}
    assert [one["model"] for one in data["blocks"]] == [one["model"] for one in data["fits"]] == [model]
    assert all(one["forward"]["median"] > 0 < one["planned_kept"] for one in data["blocks"])
    assert all(one["seconds"]["median"] > 0 < one["planned_peak"] for one in data["fits"])
    assert f"| `{model}` | 8 |" in page


def test_the_kept_page_of_large_models_is_that_of_its_figures(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "docs" / "benchmarks"
    _, page = found_by(large_blocks.main, ["--again", str(folder / "large-blocks.json")], tmp_path, None)
    assert page == (folder / "large-blocks.md").read_text()
