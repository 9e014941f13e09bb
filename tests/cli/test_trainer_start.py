"""Help, a missing configuration and a missing file are answered before torch is imported."""

import inspect
import sys
from pathlib import Path

import pytest

from lightning_hanayo import HanayoStrategy, cli
from lightning_hanayo.cli.trainer_start import COMMANDS, GROUPS, strategy_options, usage
from tests.harness import limits

LARGE = ["torch", "lightning", "jsonargparse", "wandb", "matplotlib", "numpy", "rich"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["fit", "--help"], 0, "pipeline_parallel_size (default: auto)"),
        (["validate", "--config", "wave.yaml", "-h"], 0, "usage: hanayo validate --config FILE"),
        (
            [],
            2,
            "hanayo: error: a command is missing; to start from an example: hanayo init my-gpt. See: hanayo",
        ),
        (["fti"], 2, "hanayo: error: unknown command 'fti'; did you mean 'fit'?"),
        (["schedule"], 2, "hanayo: error: a subcommand is missing: show, compare, check, export. See: hanayo schedule"),
        (["init"], 2, "hanayo: error: init needs a folder to create: hanayo init DIR"),
        (["init", "--help"], 0, "usage: hanayo init DIR [--recipe NAME]"),
        (["fit"], 2, "hanayo: error: fit needs a configuration, or at least a model: hanayo fit --config FILE."),
        (["test", "--trainer.max_steps=3"], 2, "hanayo: error: test needs a configuration"),
        (
            ["fit", "--config", "nowhere.yaml"],
            2,
            "hanayo: error: --config nowhere.yaml: there is no such file; to start",
        ),
        (["check"], 2, "hanayo: error: check needs a configuration"),
        (["check", "--config", "nowhere.yaml"], 2, "hanayo: error: --config nowhere.yaml: there is no such file"),
        (["fit", "-c", "wav.yaml"], 2, "there is no such file; in . are other.yaml, wave.yaml\n"),
        (["fit", "--config=other.yaml"], 2, "other.yaml is a list; expected sections"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_is_answered_without_large_imports(arguments: list[str], code: int, says: str, tmp_path: Path) -> None:
    if "nowhere.yaml" not in arguments:
        (tmp_path / "wave.yaml").write_text("trainer: {}\n")
        (tmp_path / "other.yaml").write_text("[1, 2]\n")
    script = f"""
import sys
from lightning_hanayo.cli import run
try:
    found = run({arguments})
except SystemExit as end:
    found = end.code or 0
assert found == {code}
assert not set({LARGE}) & set(sys.modules)
"""
    done = limits.run([sys.executable, "-c", script], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert says in (done.stdout if code == 0 else done.stderr)


def test_help_describes_each_option_of_the_strategy_once() -> None:
    parameters = dict(list(inspect.signature(HanayoStrategy.__init__).parameters.items())[1:])
    assert list(strategy_options()) == list(parameters)
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(parameters)
    for name, option in strategy_options().items():
        default = parameters[name].default
        if isinstance(default, int | float | str):  # others are written in YAML's words
            assert option.default == str(default).lower()
        assert option.meaning.endswith(".") and name in usage("fit")


def test_help_is_narrow_and_of_the_same_commands() -> None:
    assert all(command in cli.COMMANDS for command in COMMANDS)
    assert max(map(len, usage("fit").splitlines())) <= 110
