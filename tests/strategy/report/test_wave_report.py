"""The report of a run over real processes: what loggers get, what is written, and that the next run plans with it."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_hanayo import WaveReport
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.files import Profile
from lightning_hanayo.schedule import Action, simulate
from lightning_hanayo.strategy.setup.plan import plan_model
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer

WAVE = Layout(2, 2, 1, schedule="hanayo-zb")
STEPS = 5
WORLD, MFLOPS = 2, 3 * 2 * (16 * 16 + 8 * 2 * 16 * 32 + 16 * 5) / 1e6
"""of a sample: embedding, blocks and head, forward and backward"""


class WithExample(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, models.WIDTH)


def fit(folder: str, layout: Layout = WAVE) -> None:
    """One rank's part of a run."""
    options: dict[str, Any] = {"max_steps": STEPS, "log_every_n_steps": 2, "default_root_dir": folder}
    options |= {"logger": CSVLogger(folder, name="", version=""), "callbacks": [WaveReport(picture=None)]}
    make_trainer(layout, **options).fit(models.build(WithExample), make_loader(models.vectors((8,) * STEPS)))


def test_a_step_on_whole_batches_is_measured(pool: Pool, tmp_path: Path) -> None:
    pool.run(WORLD, fit, str(tmp_path), replace(WAVE, step="batch"))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [row for row in rows if row["hanayo/exposed_communication"]]
    profile = Profile.load(tmp_path / "profile.json")
    assert profile is not None


def test_a_run_is_measured_and_the_next_one_planned_with_it(pool: Pool, tmp_path: Path) -> None:
    pool.run(WORLD, fit, str(tmp_path))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".json", ".json", ".yaml"]
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    _check_figures([row for row in rows if row["hanayo/exposed_communication"]])
    counted = [row for row in rows if row["hanayo/samples_per_s"]]
    assert [row["step"] for row in counted] == ["1", "3"]
    assert all(float(row["hanayo/samples_per_s"]) > 0 for row in counted)
    for row in counted:
        flops = float(row["hanayo/samples_per_s"]) * MFLOPS * 1e6 / WORLD
        assert float(row["hanayo/device_flops_per_s"]) == pytest.approx(flops, rel=1e-6)
    assert "hanayo/mfu" not in rows[0], "the peak of a CPU isn't known"
    assert [row["hanayo/samples"] for row in counted] == ["16", "32"]
    assert all(float(rows[-1][f"hanayo/rank_{rank}/peak_memory_bytes"]) > 1e6 for rank in range(WORLD))
    facts = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
    whole = models.build(WithExample)
    assert facts["hanayo/parameters"] == sum(parameter.numel() for parameter in whole.parameters())
    _check_trace(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])

    profile = Profile.load(tmp_path / "profile.json")
    assert (profile.schedule, profile.num_ranks, profile.num_waves) == ("hanayo-zb", 2, 2)
    assert sum(profile.blocks) == models.NUM_BLOCKS
    strategy = make_strategy(WAVE, costs=str(tmp_path / "profile.json"))
    model = models.build(models.MLP)
    layout = plan_model(model, strategy.options, WAVE.topology, steady=False, is_converted=False).layout
    bubble = simulate(layout.table(WAVE.num_microbatches), profile.costs).bubble_ratio
    assert layout.predict() == pytest.approx(bubble)


def _check_figures(rows: list[dict[str, str]]) -> None:
    assert [row["step"] for row in rows] == ["1", "3"], "as often as the Trainer logs, each under its own number"
    stages = [f"hanayo/stage_{s}/{k}_ms" for s in range(8) for k in ("forward", "backward_input", "backward_weight")]
    for row in rows:
        assert 0 <= float(row["hanayo/exposed_communication"]) <= float(row["hanayo/bubble"]) < 1
        assert all(float(row[name]) > 0 for name in stages)


def _check_trace(events: list[dict[str, Any]]) -> None:
    """The last four batches, and one as it was simulated."""
    actions = [event for event in events if event["ph"] == "X" and event["cat"] != "wait"]
    measured, predicted = ([Action.parse(e["name"]) for e in actions if e["pid"] == process] for process in (0, 1))
    assert sorted(measured, key=str) == sorted(4 * predicted, key=str)
    assert len(predicted) == 3 * 8 * WAVE.num_microbatches
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")


class Pictures(TensorBoardLogger):
    """A logger of TensorBoard, which needn't be installed."""

    def __init__(self) -> None:
        super().__init__("unused")
        self.metrics: set[str] = set()
        self.images: list[tuple[str, int, tuple[int, ...]]] = []

    @property
    def experiment(self) -> Any:
        return self

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """None are kept."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics |= metrics.keys()

    def save(self) -> None:
        """Nothing is kept."""

    def add_image(self, name: str, image: Any, global_step: int, dataformats: str) -> None:
        assert dataformats == "HWC"
        self.images.append((name, global_step, image.shape))


def fit_with_pictures(folder: str) -> tuple[set[str], list[Any]]:
    with patch("lightning.fabric.loggers.tensorboard._TENSORBOARD_AVAILABLE", True):
        logger = Pictures()
    options: dict[str, Any] = {"logger": logger, "callbacks": [WaveReport(trace=None, profile=None)]}
    trainer = make_trainer(WAVE, max_steps=STEPS, log_every_n_steps=2, default_root_dir=folder, **options)
    trainer.fit(models.build(models.MLP), make_loader(models.vectors((8,) * STEPS)))
    return logger.metrics, logger.images


@pytest.mark.thorough
def test_a_logger_that_takes_images_gets_figures_and_pictures(pool: Pool, tmp_path: Path) -> None:
    (metrics, images), *_ = pool.run(WORLD, fit_with_pictures, str(tmp_path))
    assert {"hanayo/bubble", "hanayo/stage_0/forward_ms"} <= metrics
    (planned, _, _), (name, step, shape) = images
    assert (planned, name, step) == ("hanayo/schedule", "hanayo/wave", STEPS) and shape[1] == 1600


def test_bad_numbers() -> None:
    with pytest.raises(HanayoError, match="every_n_steps=-1"):
        WaveReport(every_n_steps=-1)
    with pytest.raises(HanayoError, match="flops_per_batch=0"):
        WaveReport(flops_per_batch=0)


def test_a_run_that_resumes_counts_on() -> None:
    report, resumed = WaveReport(), WaveReport()
    report._totals["samples"] = 32
    resumed.load_state_dict(report.state_dict())
    assert resumed.state_dict()["samples"] == 32
