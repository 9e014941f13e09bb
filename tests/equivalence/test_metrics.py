"""Metrics and decisions are the same on every rank, and the same as in one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, data_rank, make_loader, make_trainer

TRAINING = Training(models.Metrics, partial(models.vectors, (8, 8, 6)), torch.float64)
VALIDATION = Training(models.Metrics, partial(models.vectors, (8, 6, 2)), torch.float64)
CUBE = (1, 2, 1)
LAYOUTS = [
    Layout(2, 1, 1),
    Layout(2, 2, 1),
    Layout(4, 1, 1, "1f1b"),
    Layout(2, 1, 2),
    Layout(2, cube=CUBE),
    Layout(cube=CUBE),
]


class History(Callback):
    """Records all metrics that a callback can read, in each of its hooks."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []
        self.learning_rates: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.steps.append(_numbers(trainer, "_step"))

    def on_validation_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append(_numbers(trainer, "val_"))

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.epochs.append(_numbers(trainer, "_epoch"))

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self.learning_rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def _numbers(trainer: Trainer, part: str) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if part in name}


def watch(layout: Layout, folder: Path) -> dict[str, Any]:
    """The metrics and decisions of one rank, in a run that stops early."""
    history = History()
    stopping = EarlyStopping("val_loss", min_delta=100.0, patience=2)  # no improvement is that large, so it stops
    saving = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}")
    trainer = make_trainer(layout, max_epochs=9, callbacks=[history, stopping, saving], enable_checkpointing=True)
    loaders = (make_loader(data.share(data_rank(layout), layout.data)) for data in (TRAINING, VALIDATION))
    trainer.fit(models.build(models.Metrics, TRAINING.dtype), *loaders)
    return {
        "steps": history.steps,
        "validations": history.validations,
        "epochs": history.epochs,
        "learning rates": history.learning_rates,
        "stopped": stopping.stopped_epoch,
        "best file": Path(saving.best_model_path).name,
        "best score": float(saving.best_model_score),
    }


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same in a single process."""
    (view,) = pool.run(1, watch, Layout(), tmp_path_factory.mktemp("alone"))
    return view


@pytest.mark.parametrize("layout", covered(LAYOUTS, by=LAYOUTS[1:2]), ids=str)
def test_every_rank_has_the_metrics_and_decisions_of_one_process(
    pool: Pool, tmp_path: Path, layout: Layout, alone: dict[str, Any]
) -> None:
    assert alone["stopped"] == 2
    ranks = pool.run(layout.world_size, watch, layout, tmp_path / "pipeline")
    for view in ranks:
        for moment in ("validations", "epochs"):
            assert view[moment] == [pytest.approx(numbers, rel=1e-10) for numbers in alone[moment]]
        for decision in ("stopped", "learning rates", "best file"):
            assert view[decision] == alone[decision]
        assert view["best score"] == pytest.approx(alone["best score"], rel=1e-10)
    assert ranks[0]["steps"] == [pytest.approx(numbers, rel=1e-10) for numbers in alone["steps"]]
    assert (tmp_path / "pipeline" / alone["best file"]).exists()
