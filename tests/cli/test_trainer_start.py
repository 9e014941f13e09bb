"""A missing configuration and a missing file are reported before torch is imported."""

import sys
from pathlib import Path

import pytest

from tests.harness import limits

LARGE = ["torch", "lightning", "jsonargparse", "wandb", "matplotlib", "numpy", "rich"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
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
        (["fit", "my.yaml"], 2, "or at least a model: hanayo fit --config my.yaml."),
        (["test", "--trainer.max_steps=3"], 2, "hanayo: error: test needs a configuration"),
        (
            ["fit", "--config", "nowhere.yaml"],
            2,
            "hanayo: error: --config nowhere.yaml: there is no such file; to start",
        ),
        (["check"], 2, "hanayo: error: check needs a configuration"),
        (["check", "--config", "nowhere.yaml"], 2, "hanayo: error: --config nowhere.yaml: there is no such file"),
        (["fit", "-c", "wav.yaml"], 2, "there is no such file; in . are other.yaml, wave.yaml\n"),
        (["fit", "--config=other.yaml"], 2, "other.yaml is no configuration: it is a list; expected sections"),
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
