"""The commands and the Python code of docs/guides/schedule.md run, and write the files that it names."""

import re
import shlex
from pathlib import Path

import pytest

from lightning_hanayo import cli

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "schedule.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [shlex.split(line) for block in blocks("bash") for line in block.replace("\\\n", "").splitlines()]
    assert len(lines) == 7
    for program, *arguments in lines:
        assert program == "hanayo"
        assert cli.run(arguments) == 0, capsys.readouterr().err
    written = {"wave.png", "wave.html", "wave.json", "all.png", "mine.csv", "whole.csv"}
    assert {path.name for path in Path().iterdir()} == written


def test_python_runs() -> None:
    (code,) = blocks("python")
    names: dict[str, object] = {}
    exec(code, names)
    assert {path.name for path in Path().iterdir()} == {"wave.png", "wave.html", "wave.json"}


def test_images_exist_and_are_small() -> None:
    images = re.findall(r"!\[.+?\]\((.+?)\)", GUIDE)
    assert len(images) == 3
    for image in images:
        assert 10_000 < (ROOT / "docs" / "guides" / image).stat().st_size < 200_000
