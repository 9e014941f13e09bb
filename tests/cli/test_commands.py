"""`hanayo`: --help imports nothing large, and a mistake gives one message and exit code 2."""

import sys
from pathlib import Path

import pytest

from lightning_hanayo import cli
from lightning_hanayo.errors import HanayoError, is_rank_zero
from tests.harness import limits

LARGE = ["torch", "lightning", "jsonargparse", "wandb", "matplotlib", "numpy", "rich"]


def test_help_imports_nothing_large() -> None:
    code = f"""
import sys
from lightning_hanayo.cli import run
assert run(["--help"]) == 0
print(sorted(set({LARGE}) & set(sys.modules)))
"""
    done = limits.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(name in done.stdout for name in cli.COMMANDS)


def test_python_m_runs_the_command_line() -> None:
    done = limits.run([sys.executable, "-m", "lightning_hanayo", "fti"])
    assert done.returncode == 2
    assert done.stderr == (
        "hanayo: error: unknown command 'fti'; did you mean 'fit'? "
        "Known: init, fit, validate, test, predict, check, plan, doctor, schedule, ckpt. See: hanayo --help\n"
    )


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, True),
        ({"LOCAL_RANK": "0", "NODE_RANK": "0"}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "GROUP_RANK": "1", "RANK": "4"}, False),
        ({"LOCAL_RANK": "0", "RANK": "0"}, True),
        ({"SLURM_PROCID": "3"}, False),
    ],
)
def test_global_rank_0_is_found_by_the_launchers_variables(environment: dict[str, str], expected: bool) -> None:
    assert is_rank_zero(environment) is expected


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A command `fail` that raises a HanayoError."""
    (tmp_path / "failing_command.py").write_text(
        "from lightning_hanayo.errors import HanayoError\n\ndef run(argv):\n    raise HanayoError('3 of 2')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(cli.COMMANDS, "fail", ("failing_command", "fails"))


@pytest.mark.usefixtures("failing")
def test_a_mistake_is_one_line_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["fail"]) == 2
    assert capsys.readouterr().err == "hanayo: error: 3 of 2\n"


@pytest.mark.usefixtures("failing")
def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cli.run(["fail"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("failing")
def test_hanayo_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANAYO_DEBUG", "1")
    with pytest.raises(HanayoError, match="3 of 2"):
        cli.run(["fail"])
