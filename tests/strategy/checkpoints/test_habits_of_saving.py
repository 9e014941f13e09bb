"""What else of Lightning saves and reads checkpoints: tuners, averages of weights, names such as "best"."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from torch import Tensor
from torch.utils.data import DataLoader

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout, assert_close, make_loader
from tests.strategy.checkpoints.saving_runs import Left, Scored, fit, quiet, trainer_for

ALONE, PIPE, DATA = Layout(), Layout(2), Layout(1, data=2)

pytestmark = pytest.mark.thorough


class Tuned(Scored):
    """Has a learning rate and a batch size that can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 1e-3, 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        (batch,) = models.vectors((64,))
        samples = [dict(zip(batch, sample, strict=True)) for sample in zip(*batch.values(), strict=True)]
        return DataLoader(samples, batch_size=self.batch_size)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def tune(layout: Layout, folder: Path) -> tuple[list[float], int]:
    """Search for both, from checkpoints in the folder; return the losses of the first search, and the batch size."""
    rate, size = LearningRateFinder(num_training_steps=6, early_stop_threshold=None), BatchSizeFinder(max_trials=2)
    for finder in (rate, size):
        options = {"default_root_dir": folder, "enable_checkpointing": False, "max_epochs": 1}
        trainer = trainer_for(layout, [finder], limit_val_batches=0, **options)
        module = models.build(Tuned)
        trainer.fit(module)
    assert rate.optimal_lr is not None
    return rate.optimal_lr.results["loss"], module.batch_size


def test_tuners_go_back_to_where_they_began(pool: Pool, tmp_path: Path) -> None:
    ((losses, batch_size),) = pool.run(1, tune, ALONE, tmp_path)
    for found, size in pool.run(2, tune, PIPE, tmp_path):
        assert found == pytest.approx(losses, abs=1e-5)
        assert size == batch_size > 2
    assert not list(tmp_path.rglob("*.ckpt"))


def average(layout: Layout, folder: Path, start: Path | None) -> dict[str, Tensor]:
    """Train with averaged weights."""
    with quiet():
        callbacks = [ModelCheckpoint(folder, save_last=True), EMAWeightAveraging()]
        trainer = trainer_for(layout, callbacks, max_epochs=4 if start else 2)
        module = models.build(Scored)
        fit(trainer, module, layout, start)
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_averaged_weights_are_resumed(pool: Pool, tmp_path: Path) -> None:
    ends = []
    for layout in (ALONE, DATA):
        folder = tmp_path / str(layout)
        for start in (None, folder / "last.ckpt"):
            averaged, *_ = pool.run(layout.world_size, average, layout, folder, start)
        ends.append(averaged)
    assert_close(ends[1], ends[0], 1e-6)


def by_name(layout: Layout, folder: Path) -> tuple[float, int]:
    """Train, validate the best, and go on from the last."""
    for message in (".*without a model", ".*no last checkpoint", ".*multiple `ModelCheckpoint`"):
        warnings.filterwarnings("ignore", message=message)
    with quiet():
        saving, loader = ModelCheckpoint(folder, "{epoch}", save_last=True), make_loader(models.vectors((8, 8)))
        trainer = trainer_for(layout, [saving, OnExceptionCheckpoint(folder)], max_epochs=2)
        fit(trainer, models.build(Scored), layout)
        (metrics,) = trainer.validate(models.build(Scored), loader, ckpt_path="best")
        trainer = trainer_for(layout, [saving], max_epochs=3)
        fit(trainer, models.build(Scored), layout, "last")
    return metrics["val_loss"], trainer.global_step


def test_the_best_and_the_last_are_found_by_name(pool: Pool, tmp_path: Path) -> None:
    ((loss, step),) = pool.run(1, by_name, ALONE, tmp_path / "alone")
    for found in pool.run(2, by_name, PIPE, tmp_path / "sharded"):
        assert found == (pytest.approx(loss, abs=1e-6), step)
    left = [Left.in_folder(tmp_path / name).steps for name in ("alone", "sharded")]
    assert left[0] == left[1]
