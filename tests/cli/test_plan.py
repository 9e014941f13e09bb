"""`hanayo plan`: the table, the file that `hanayo fit` runs, the picture, JSON, and what is refused."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from lightning_hanayo import cli
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.candidates import Choices
from lightning_hanayo.planner.files import Profile
from lightning_hanayo.planner.machine import machine
from lightning_hanayo.schedule import CostModel
from tests.harness.launch import launch

MODULE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(LightningModule):
    def __init__(self, width: int = 16, blocks: int = 8, item: bool = False, encoder: bool = False):
        super().__init__()
        self.item = item
        self.first = nn.Linear(8, width)
        layer = lambda: nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.blocks = nn.ModuleList(layer() if encoder else Block(width) for _ in range(blocks))
        self.rate = float(torch.linspace(0, 1, 3)[1]) if item else 0.5

    def training_step(self, batch, batch_idx):
        x = self.first(batch if batch.shape[-1] == 8 else batch.T).unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        loss = x.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 8, rows: int = 64, mode: str = ""):
        super().__init__()
        self.batch_size, self.rows, self.mode = batch_size, rows, mode
        if mode == "values" and not torch.ones(1).item():
            raise ValueError

    def train_dataloader(self):
        if self.mode == "broken":
            raise OSError("no such corpus")
        rows = torch.arange(self.rows * 8.0).view(self.rows, 8) / 512
        stack = (lambda rows: torch.stack(rows, 1)) if self.mode == "transposed" else None
        return DataLoader(rows, batch_size=self.batch_size, collate_fn=stack)
"""
STRATEGY = "--trainer.strategy"
RECIPE = """
model:
  class_path: planned_model.Model
data:
  class_path: planned_model.Data
trainer:
  accelerator: cpu
  devices: 1
  accumulate_grad_batches: 2
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the user's module and recipe."""
    (tmp_path / "planned_model.py").write_text(MODULE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "planned_model", raising=False)
    return tmp_path


def run(*argv: str) -> int:
    """Run `hanayo plan --config recipe.yaml` and return its exit code."""
    try:
        return cli.run(["plan", "--config=recipe.yaml", *argv])
    except SystemExit as end:
        return int(end.code or 0)


def test_a_table_a_file_and_a_picture(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--devices=4", "--device=cpu", "--top=3") == 0
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert "8 blocks (blocks)" in lines[0]
    assert lines[1].startswith("4 x cpu, 4 per node; a nominal core")
    assert lines[2] == "16 samples per step; at most 14.4 GB per device", "8 of the loader x 2 accumulated batches"
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in "123"] == ["1", "2", "3"]
    assert "layouts considered" in output
    assert re.search(r"\b1 (samples|micro-batches|data ranks)\b", output) is None
    assert lines[-2] == "written: plan.yaml, plan.png"
    assert lines[-1] == "run it: hanayo fit --config recipe.yaml --config plan.yaml"
    assert (here / "plan.png").read_bytes().startswith(b"\x89PNG")
    made = yaml.safe_load((here / "plan.yaml").read_text())
    options = made["trainer"]["strategy"]["init_args"]
    batches = made["data"]["init_args"]["batch_size"] * made["trainer"]["accumulate_grad_batches"]
    assert options["data_parallel_size"] * batches == 16


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The plan as JSON."""
    assert run("--devices=4", "--device=cpu", "--json", *argv) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


@pytest.mark.parametrize(
    ("argv", "samples"),
    [
        (["--trainer.strategy=ddp", "--trainer.devices=4"], 4 * 16),
        (["--trainer.strategy=hanayo", "--trainer.devices=4"], 16),
        (["--trainer.strategy=hanayo", "--trainer.devices=auto"], 16),
        (
            ["--trainer.strategy=lightning_hanayo.HanayoStrategy", "--trainer.strategy.data_parallel_size=auto"]
            + ["--trainer.strategy.pipeline_parallel_size=2", "--trainer.devices=4", "--trainer.num_nodes=2"],
            4 * 16,
        ),
        pytest.param(
            ["--trainer.strategy=lightning_hanayo.HanayoStrategy", "--trainer.strategy.batch_dim=1"]
            + ["--data.mode=transposed", "--data.batch_size=16"],
            32,
            marks=pytest.mark.thorough,
        ),
        pytest.param(["--data.mode=values", "--model.item=true"], 16, marks=pytest.mark.thorough),
    ],
    ids=["ddp", "hanayo", "auto", "data ranks", "batch_dim", "values"],
)
def test_samples_per_step_are_those_of_the_configuration(
    argv: list[str], samples: int, capsys: pytest.CaptureFixture[str]
) -> None:
    made = planned(capsys, *argv)
    assert made["global_batch"] == samples
    assert all(one["data"] * one["batch_size"] * one["accumulate"] == samples for one in made["layouts"])


@pytest.mark.parametrize(
    ("argv", "choices"),
    [
        ([], Choices()),
        (["--pairs=on", "--cube-weights=batch"], Choices(("batch",), (True,))),
        (["--pairs=off", "--cube-weights=microbatch"], Choices(("microbatch",), (False,))),
        (["--model.encoder=false"], Choices(pairs=(False,))),
        (
            [f"{STRATEGY}=lightning_hanayo.HanayoStrategy", f"{STRATEGY}.cube_outside=tokens"],
            Choices(pairs=(False,), cube_outside=("tokens",)),
        ),
        (
            [f"{STRATEGY}=lightning_hanayo.HanayoStrategy", f"{STRATEGY}.step=batch"],
            Choices(pairs=(False,), runs_step_once=True),
        ),
    ],
    ids=str,
)
def test_choices_in_cubes(argv: list[str], choices: Choices) -> None:
    with patch("lightning_hanayo.cli.plan_cli.make_plan", side_effect=HanayoError) as make_plan:
        run("--devices=4", "--device=cpu", "--model.encoder=true", *argv)
    assert make_plan.call_args.kwargs["choices"] == choices


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--devices=64", "--nodes=8", "--device=h100", "--global-batch=128", "--memory=1GB", "--json") == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert made["devices"] == 64
    assert made["memory_limit"] == 1e9
    assert made["machine"]["ranks_per_node"] == 8
    assert made["considered"] >= made["fit"] > 0
    seconds = [one["seconds"] for one in made["layouts"]]
    assert seconds == sorted(seconds)
    for one in made["layouts"]:
        assert one["data"] * one["batch_size"] * one["accumulate"] == 128
        assert one["memory"]["total"] <= 1e9


HANAYO = [f"{STRATEGY}=lightning_hanayo.HanayoStrategy", f"{STRATEGY}.pipeline_parallel_size=2"]


def test_the_given_layout_is_predicted_rank_by_rank(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--given", "--device=cpu", "--devices=4", *HANAYO, f"{STRATEGY}.data_parallel_size=2"]
    argv += [f"{STRATEGY}.num_waves=2", f"{STRATEGY}.schedule=hanayo-zb"]
    assert run(*argv, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    layout, ranks = made["layout"], made["ranks"]
    assert (layout["pipe"], layout["num_waves"], layout["data"], layout["schedule"]) == (2, 2, 2, "hanayo-zb")
    assert layout["samples"] * layout["num_microbatches"] == 8 and layout["accumulate"] == 2
    assert len(ranks) == 2 and all(sum(one.values()) == pytest.approx(2 * one["total"]) for one in ranks)
    weights = 8 * (2 * 16 * 64 + 16 + 64) + 16 * 9  # of 8 blocks and the first layer
    assert sum(one["weights"] for one in ranks) == pytest.approx(4 * weights)
    assert run(*argv, "--memory=1KB") == 0
    output = capsys.readouterr().out
    assert output.startswith("P=2 x W=2, D=2, B=4 of 2 x 2 batches, hanayo-zb: ")
    assert "it does not fit into 1.0 KB per device" in output
    assert not (here / "plan.yaml").exists()


@pytest.mark.thorough  # other tests read plans as the strategy's arguments
@pytest.mark.slow
def test_hanayo_fit_runs_the_plan(here: Path) -> None:
    assert run("--devices=2", "--device=cpu", "--global-batch=16", "--memory=200KB") == 0
    options = yaml.safe_load((here / "plan.yaml").read_text())["trainer"]["strategy"]["init_args"]
    assert options["pipeline_parallel_size"] * options["data_parallel_size"] != 1
    ended = launch(here, "-m", "lightning_hanayo", "fit", "--config", "recipe.yaml", "--config", "plan.yaml")
    assert (ended.code, ended.leftover) == (0, []), ended.output


def test_a_measured_machine_and_profile(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine("cpu").save(here / "machine.json")
    costs = CostModel((1e-2,) * 4, (1e-2,) * 4, (1e-2,) * 4, message=1e-4)
    Profile("hanayo-zb", 2, 1, 4, (2,) * 4, costs).save(here / "profile.json")
    times = []
    for profile in ([], ["--profile=profile.json"]):
        assert run("--devices=2", "--machine=machine.json", "--json", *profile) == 0
        times.append(json.loads(capsys.readouterr().out)["layouts"][0]["seconds"])
    assert times[1] > 5 * times[0], "the measured blocks are that slow"


@pytest.mark.parametrize(
    ("blocks", "seconds", "count", "said"),
    [(3, 1e-2, 4, "it is of 12 blocks"), (2, 1e-2, 0, "0 micro-batches"), (2, 0.0, 4, "take no time")],
    ids=["blocks", "microbatches", "no_time"],
)
def test_a_profile_of_another_run(
    blocks: int, seconds: float, count: int, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = CostModel((seconds,) * 4, (seconds,) * 4, (seconds,) * 4, message=1e-4)
    Profile("hanayo-zb", 2, 1, count, (blocks,) * 4, costs).save(here / "profile.json")
    assert run("--devices=2", "--device=cpu", "--profile=profile.json") == 2
    assert said in capsys.readouterr().err


def test_a_model_whose_constructor_needs_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--devices=2", "--device=cpu", "--model.item=true") == 0
    assert "8 blocks" in capsys.readouterr().out


WRONG = {
    "no_devices": (["--device=h100"], "missing: --devices"),
    "no_device": (["--devices=8"], "one of the arguments --device --machine is required"),
    "half_nodes": (
        ["--devices=8", "--nodes=3", "--device=h100"],
        "--devices 8, of all nodes, don't divide over --nodes 3",
    ),
    "memory": (["--devices=8", "--device=h100", "--memory=lots"], "expected bytes, such as 80GB"),
    "unknown": (["--devices=8", "--device=h1000"], "device 'h1000' is unknown; did you mean 'h100'"),
    "no_fit": (["--devices=2", "--device=cpu", "--memory=1KB"], "fits into 1.0 KB on 2 devices. The nearest, "),
    "pairs": (["--devices=2", "--device=cpu", "--pairs=on"], "--pairs on: the blocks of blocks aren't registered"),
    "given": (["--devices=2", "--device=cpu", "--given"], "--given: trainer.strategy is 'auto'; give HanayoStrategy"),
    "given_batch": (
        ["--devices=2", "--device=cpu", "--given", "--global-batch=8"],
        "argument --global-batch: not allowed with argument --given",
    ),
    "given_plan": (
        ["--devices=2", "--device=cpu", "--given", HANAYO[0], f"{STRATEGY}.layout=plan"],
        "layout='plan' chooses when training starts",
    ),
    "given_schedule": (
        ["--devices=2", "--device=cpu", "--given", *HANAYO, f"{STRATEGY}.schedule=1f1b"],
        "plans don't count schedule='1f1b', but 'hanayo' or 'hanayo-zb'",
    ),
    "no_file": (["--devices=2", "--machine=none.json"], "none.json can't be read: No such file"),
    "batch": (["--devices=2", "--device=cpu", "--global-batch=0"], "expected a whole number of at least 1, got '0'"),
}


@pytest.mark.parametrize(("argv", "message"), WRONG.values(), ids=WRONG)
def test_mistakes_are_one_line(argv: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (here / "plan.yaml").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--data.rows=0"], "the training loader has no batch"),
        (["--data.mode=broken"], "the training data can't be read: OSError: no such corpus"),
        (["--output=recipe.yaml"], "--output recipe.yaml: that is the configuration itself"),
    ],
    ids=["empty", "broken", "output"],
)
def test_what_stops_a_plan(argv: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--devices=4", "--device=cpu", *argv) == 2
    assert said in capsys.readouterr().err
    assert (here / "recipe.yaml").read_text() == RECIPE
