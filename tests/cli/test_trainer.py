"""`fit`, `validate`, `test` and `predict`: configurations, the current directory, and errors for mistakes in them."""

import inspect
import logging
import os
import sys
from pathlib import Path

import pytest

from lightning_hanayo import HanayoStrategy, cli
from lightning_hanayo.errors import HanayoError

PLAIN = """
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_hanayo.errors import HanayoError


class Model(LightningModule):
    def __init__(self, width: int = 4, batch_size: int = 2):
        super().__init__()
        if width < 1:
            raise ValueError(f"width={width} is no width")
        self.layer = torch.nn.Linear(width, 1)
        self.width = width

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(4, self.width), batch_size=2)


def halves(batch, n):
    return batch.chunk(n)


class LateError(Model):
    def on_fit_start(self):
        raise HanayoError("found out late")


class Strict(SingleDeviceStrategy):
    def __init__(self, num_waves: Literal["auto"] | int = "auto", pipeline_parallel_size: int = 1):
        super().__init__("cpu")
        if pipeline_parallel_size == 3:
            raise HanayoError("pipeline_parallel_size=3 doesn't fit.\\nNearest: 2")
"""

QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=1",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a user's module that only the command line's own `sys.path` entry finds."""
    (tmp_path / "plain_model.py").write_text(PLAIN)
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "damaged.ckpt").write_bytes(b"PK, but no more")
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "folder.ckpt/manifest.json").touch()
    (tmp_path / "no_class.yaml").write_text("data:\n  init_args:\n    size: 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "plain_model", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(logging, "raiseExceptions", False)  # Lightning logs to the stderr of its import, now closed
    return tmp_path


def run(*argv: str) -> int:
    """Run a command line and return its exit code."""
    try:
        return cli.run(list(argv))
    except SystemExit as end:
        return int(end.code or 0)


def test_a_model_in_the_current_directory_trains_twice(here: Path) -> None:
    for _ in range(2):
        assert run("fit", "--model=plain_model.Model", *QUIET) == 0
    assert (here / "config.yaml").is_file(), "the configuration is saved"


def test_help_lists_lightnings_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit", "--help") == 0
    output = capsys.readouterr().out
    for option in ("usage: hanayo", "--trainer.max_steps", "--config", "--report.every_n_steps"):
        assert option in output


def test_help_describes_the_strategys_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit", "--trainer.strategy.help=lightning_hanayo.HanayoStrategy") == 0
    output = capsys.readouterr().out
    for name in list(inspect.signature(HanayoStrategy.__init__).parameters)[1:]:
        assert f"--trainer.strategy.{name}" in output


def test_the_options_of_batches_come_from_yaml(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "cut.yaml").write_text(
        "trainer:\n  strategy:\n    class_path: lightning_hanayo.HanayoStrategy\n    init_args:\n      batch_dim: 1\n"
        "      whole: [weights]\n      split_batch: plain_model.halves\n      loss_weight: shifted_tokens\n"
        "      init_from: some/folder\n"
    )
    assert run("fit", "--model=plain_model.Model", "--config=cut.yaml", "--print_config") == 0
    printed = capsys.readouterr().out
    for line in (
        "batch_dim: 1",
        "- weights",
        "split_batch: plain_model.halves",
        "loss_weight: shifted_tokens",
        "init_from: some/folder",
    ):
        assert line in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--trainer.strategy=plain_model.Strict", "--trainer.strategy.num_wave=2"], "did you mean 'num_waves'?"),
        (
            ["--trainer.strategy=lightning_hanayo.HanayoStrategy", "--trainer.strategy.num_wave=2"],
            "did you mean 'num_waves'?",
        ),
        (["--trainer.stratgy.num_nodes=2"], "unknown option 'trainer.stratgy'; did you mean 'trainer.strategy'?"),
        *(
            ([f"--{place}num_waves=2"], "num_waves is trainer.strategy.init_args.num_waves, with class_path")
            for place in ("", "strategy.", "trainer.strategy.", "trainer.stratgy.init_args.")
        ),
        (["--trainer.acceleratr=cpu"], "'trainer.acceleratr'; did you mean 'trainer.accelerator'?"),
        (["--model.widht=2"], "unknown option 'widht'; did you mean 'width'? Known: width"),
        (["--trainer.max_steps=three"], "trainer.max_steps: expected int, got three"),
        (["--trainer.strategy=plain_model.Strict", "--trainer.strategy.num_waves=x"], "expected 'auto' or int, got x"),
        (["--model=plain_model.Modle"], "module 'plain_model' has no attribute 'Modle'"),
        (["--model.width=0"], "width=0 is no width"),
        (["--config=nowhere.yaml"], "--config nowhere.yaml: there is no such file; in . are no_class.yaml"),
        (["--config=nowhere"], "File does not exist: "),
        (
            ["--trainer.strategy=plain_model.Strict", "--trainer.strategy.pipeline_parallel_size=3"],
            "pipeline_parallel_size=3 doesn't fit. Nearest: 2",
        ),
        (["--trainer.strategy=hanyo"], "invalid strategy name: `strategy='hanyo'`"),
        (["--model=plain_model.LateError"], "found out late"),
        (["--model.batch_size=0"], "model.batch_size=0: expected a whole number of at least 1"),
        (["--trainer.devices=2,"], "trainer.devices='2,': `devices` selected with `CPUAccelerator`"),
        (["--config=empty.ckpt"], "empty.ckpt is no configuration: it is empty; expected sections"),
        (["--trainer.precision=transformer-engine"], "Requirement 'transformer_engine>="),
        (["--trainer.strategy=xla"], "Requirement 'torch_xla>="),
        (["--trainer.accelerator=mps"], "`hanayo doctor` shows the build of torch and the devices"),
        (["--ckpt_path=empty.ckpt"], "ckpt_path=empty.ckpt is empty"),
        (["--ckpt_path=damaged.ckpt"], "damaged.ckpt can't be read as a checkpoint"),
        (["--ckpt_path=folder.ckpt"], "folder.ckpt/manifest.json is damaged: its first line is no JSON"),
        (["--config=no_class.yaml"], "no_class.yaml sets options of the data, but nothing says which class that is"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("fit", "--model=plain_model.Model", *QUIET, *arguments) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Seed set")]
    mistakes = [line for line in errors if line.startswith("hanayo: error: ")]
    assert len(mistakes) == 1 and message in mistakes[0]
    assert not any("Traceback" in line or "Subtypes" in line for line in errors)


def test_the_error_of_an_unknown_key_suggests_the_nearest(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "wrong.yaml").write_text(
        "trainer:\n  strategy:\n    class_path: plain_model.Strict\n    init_args:\n      num_wave: 2\n"
    )
    assert run("fit", "--model=plain_model.Model", "--config=wrong.yaml") == 2
    assert "unknown option 'num_wave'; did you mean 'num_waves'?" in capsys.readouterr().err
    (here / "wrong.yaml").write_text("trainer:\n  max_step: 2\n")
    assert run("fit", "--model=plain_model.Model", "--config=wrong.yaml") == 2
    assert "unknown option 'trainer.max_step'; did you mean 'trainer.max_steps'?" in capsys.readouterr().err


def test_hanayo_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANAYO_DEBUG", "1")
    with pytest.raises(HanayoError, match="found out late"):
        run("fit", "--model=plain_model.LateError", *QUIET)


def test_without_an_api_key_wandb_is_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert run("fit", "--model=plain_model.Model", *QUIET) == 0
    assert os.environ["WANDB_MODE"] == "offline"
