"""The guide's commands and its Python do what it says."""

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


def test_its_commands_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) == 7
    for program, *arguments in lines:
        assert program == "hanayo"
        assert cli.run(arguments) == 0, capsys.readouterr().err
    written = {"wave.png", "wave.html", "wave.json", "all.png", "mine.csv", "whole.csv"}
    assert {path.name for path in Path().iterdir()} == written


def test_its_python_runs() -> None:
    (code,) = blocks("python")
    names: dict[str, object] = {}
    exec(code, names)
    assert {path.name for path in Path().iterdir()} == {"wave.png", "wave.html", "wave.json"}


def test_its_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", GUIDE)
    assert len(pictures) == 3
    for picture in pictures:
        assert 10_000 < (ROOT / "docs" / "guides" / picture).stat().st_size < 200_000
