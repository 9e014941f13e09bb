"""`hanayo check` and `check`: verdicts on the screen and as JSON, exit codes, and no process left behind."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lightning_hanayo import cli
from tests.harness.launch import launch

MODULE = """
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader


class Block(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


class Model(LightningModule):
    def __init__(self, stores: bool = False, padding: bool = False, fails: bool = False):
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(6))

        self.previous = 0.0

    def training_step(self, batch, batch_idx):
        x, labels = batch
        assert not self.hparams.fails, "as planned"
        x = x * (1 + self.previous)
        for block in self.blocks:
            x = block(x)
        if self.hparams.stores:
            self.previous = float(x.detach().sum())
        ignored = -100 if self.hparams.padding else 7
        return nn.functional.cross_entropy(x, labels, ignore_index=ignored)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        torch.manual_seed(0)
        labels = torch.randint(7, (32,))
        if self.hparams.padding:
            labels[torch.rand(32) < 0.5] = -100
        return DataLoader(list(zip(torch.randn(32, 8), labels)), batch_size=8, shuffle=True)
"""
CONFIG = """
model:
  class_path: checked_model.Model
trainer:
  accelerator: gpu
  devices: 2
  num_nodes: 1
  precision: bf16-mixed
  max_steps: 1000
  gradient_clip_val: 1.0
  strategy:
    class_path: lightning_hanayo.HanayoStrategy
    init_args:
      num_waves: 1
      num_microbatches: 4
"""
SCRIPT = """
from checked_model import Model

from lightning_hanayo import HanayoStrategy, check


class Local(Model):
    pass


verdict = check(Local(), strategy=HanayoStrategy(pipeline_parallel_size=2, num_waves=1))
print(verdict.summary)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the user's module and configuration."""
    (tmp_path / "checked_model.py").write_text(MODULE)
    (tmp_path / "recipe.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "checked_model", raising=False)
    return tmp_path


def run(*argv: str) -> int:
    """Run `hanayo check` and return its exit code."""
    before = psutil.Process().children(recursive=True)
    try:
        code = cli.run(["check", *argv])
    except SystemExit as end:
        code = int(end.code or 0)
    assert set(psutil.Process().children(recursive=True)) <= set(before), "processes are left behind"
    return code


def test_an_exact_layout_gives_zero_and_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config=recipe.yaml", "--steps=1", "--depth=4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("the layout is exact (largest difference ")
    assert [line.split()[:2] for line in lines[2:5]] == [["losses", "1"], ["gradients", "8"], ["weights", "8"]]


def test_a_difference_gives_one_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config=recipe.yaml", "--model.stores=true") == 1
    output = capsys.readouterr().out
    assert "the layout differs, first in the loss of batch 0 in step 0" in output
    assert "It is computed by the step on pipeline rank 0." in " ".join(output.split())


@pytest.mark.thorough
def test_micro_batches_that_make_a_difference_give_one_unless_they_are_accepted() -> None:
    padded = "--config=recipe.yaml", "--model.padding=true", "--trainer.strategy.init_args.step=microbatch"
    assert run("--config=recipe.yaml", "--model.padding=true") == 0
    assert run(*padded) == 1
    assert run(*padded, "--accept-microbatches") == 0


def test_json_is_all_that_is_printed_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    own = "--trainer.strategy.init_args.pipeline_parallel_size=2"
    assert run("--config=recipe.yaml", "--json", "--trainer.devices=auto", own) == 0, "the sizes say how many processes"
    output = capsys.readouterr()
    parsed = json.loads(output.out)
    assert parsed["outcome"] == "exact" and parsed["layout"]["num_values"]["gradient"] == 24
    assert "processes" not in output.err, "progress is shown in a terminal only"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps=0"], "steps=0"),
        (["--steps=100"], "the check needs 100 batches"),
        (["--depth=3"], "every stage needs a block"),
        (["--depth=7"], "depth=7: expected 2 to 6, the blocks of blocks"),
        (["--depth=1"], "depth=1: expected 2 to 6, the blocks of blocks"),
        (["--step=1"], "unknown option 'step'"),
        (["--trainer.devices=auto"], "nothing says how many processes the layout has: give devices=N"),
        (["--trainer.devices=-1"], "trainer.devices='-1': a check needs a number"),
        (["--trainer.strategy=ddp"], "a check needs HanayoStrategy"),
        (["--model.fails=true"], "the module fails in one process, on whole batches: AssertionError: as planned"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_gives_two_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config=recipe.yaml", *arguments) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hanayo: error: ")]
    assert len(errors) == 1 and message in errors[0]


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    output = capsys.readouterr().out
    for part in ("usage: hanayo check --config recipe.yaml", "--depth N", "Exit codes: 0 exact", "hanayo fit --help"):
        assert part in output


def test_help_waits_for_neither_torch_nor_lightning() -> None:
    code = "import sys; from lightning_hanayo.cli.check import _parser; _parser().format_help(); "
    code += "assert not {'torch', 'lightning'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.thorough  # the other tests run the same in this process
def test_a_plain_script_checks_its_own_module(here: Path) -> None:
    """Its classes are in `__main__`, and it has no `if __name__ == "__main__"`."""
    (here / "script.py").write_text(SCRIPT)
    ended = launch(here, "script.py")
    assert (ended.code, ended.leftover) == (0, []), ended.output
    assert ended.output.splitlines()[-1].startswith("the layout is exact"), ended.output
