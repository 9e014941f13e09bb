"""The report regenerates tables and figures from the measured data, letter for letter.

docs/benchmarks/steps.json --> table --> docs/benchmarks/steps.md
"""

from pathlib import Path

import pytest

from recipes.benchmarks.report import main

PAGES = Path(__file__).parents[3] / "docs" / "benchmarks"


@pytest.mark.parametrize(
    "name", ["action", "messages", "pipeline-2", "pipeline-4", "pipeline-8", "real", "runtime", "steps"]
)
def test_a_page_is_regenerated(name: str, tmp_path: Path) -> None:
    table, figures = tmp_path / "found.md", tmp_path / "found.json"
    assert main([str(PAGES / f"{name}.json"), "--table", str(table), "--json", str(figures)]) == 0
    assert table.read_text() == (PAGES / f"{name}.md").read_text()
    assert figures.read_text() == (PAGES / f"{name}.json").read_text()


@pytest.mark.parametrize("name", ["action", "real", "steps"])
def test_pictures_are_drawn(name: str, tmp_path: Path) -> None:
    assert main([str(PAGES / f"{name}.json"), "--picture", str(tmp_path / "found.png")]) == 0
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["tensor3d.json", "steps.md", "nothing.json"])
def test_other_files_are_rejected_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(PAGES / name)]) == 2
    error = capsys.readouterr().err
    assert name in error and "recipes.benchmarks.pipeline" in error and error.count("\n") == 1
