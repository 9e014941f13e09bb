"""`python -m recipes.NAME --help` prints what the program does, and does nothing else."""

import runpy
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
PROGRAMS = sorted(
    ".".join(path.parent.relative_to(RECIPES.parent).parts)
    for path in RECIPES.rglob("__main__.py")
    if path.parent.name != "ray"  # may not be installed
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    monkeypatch.delitem(sys.modules, f"{program}.__main__", raising=False)  # another test may have imported it
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(program, run_name="__main__")
    assert ended.value.code == 0
    assert f"usage: python -m {program}" in capsys.readouterr().out
