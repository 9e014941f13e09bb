"""Features: what is logged, how it is reduced, and which loggers get it."""

from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.features.feature import AsDDP, Equal, Feature, Refused, on
from tests.features.loaders import TwoOfEach
from tests.features.net import Net
from tests.features.trial import Trial
from tests.harness.models import CLASSES, WIDTH, Batch


class LogsOptions(Net):
    """`self.log` with every option, in a step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("step", loss, sync_dist=True)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("not to the logger", loss, logger=False, on_epoch=True, sync_dist=True)
        self.log("a number", 3.5, on_epoch=True)
        return loss


class LogsReduced(Net):
    """Other reductions than the mean."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self(batch["x"])
        for name in ("min", "max", "mean"):
            value = getattr(logits.detach(), name)()
            self.log(name, value, reduce_fx=name, on_step=True, on_epoch=True, sync_dist=True)
        self.log("samples", float(len(logits)), reduce_fx="sum", on_step=True, on_epoch=True, sync_dist=True)
        return self.loss(batch)


class LogsDictionary(Net):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_dict({"loss": loss, "doubled": 2 * loss}, on_epoch=True, sync_dist=True, batch_size=len(batch["x"]))
        return loss


class LogsLocally(Net):
    """Without `sync_dist` rank 0 logs what its own samples give."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class LogsOnRankZero(Net):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.trainer.is_global_zero:
            self.log("of rank 0", loss, rank_zero_only=True)
        return loss


class LogsWithoutIndex(Net):
    """Two validation loaders."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(f"loss_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False, sync_dist=True)


class LogsInHooks(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_idx", float(batch_idx))

    def on_train_epoch_end(self) -> None:
        self.log("epoch_squared", float(self.current_epoch) ** 2)
        self.logger.log_metrics({"by hand": 1.0}, step=self.global_step)  # type: ignore[union-attr]

    def on_validation_epoch_end(self) -> None:
        self.log("twice", 2 * self.trainer.callback_metrics["train_loss"] if self.global_step else 0.0)


class LogsMetrics(Net):
    """Metrics of torchmetrics, logged as objects, and computed in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.several = MetricCollection(
            {"accuracy": MulticlassAccuracy(CLASSES, average="micro"), "f1": MulticlassF1Score(CLASSES)},
            prefix="train_",
        )
        self.by_hand = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self(batch["x"])
        self.mean(logits.detach())
        self.several(logits.detach(), batch["y"])
        self.by_hand.update(logits.detach(), batch["y"])
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        return torch.nn.functional.cross_entropy(logits, batch["y"])

    def on_train_epoch_end(self) -> None:
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()


class StepMetric(Net):
    """A metric that is logged with each step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self(batch["x"])
        self.accuracy(logits.detach(), batch["y"])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return torch.nn.functional.cross_entropy(logits, batch["y"])


class LogsFromCallback(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        pl_module.log("from_callback", float(trainer.global_step))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.logger.log_metrics({"in a callback": 1.0}, trainer.global_step)  # type: ignore[union-attr]


class Hyper(Net):
    def __init__(self, rate: float = 0.1, name: str = "net") -> None:
        super().__init__()
        self.save_hyperparameters()


class HasExample(Net):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, WIDTH)


class GraphLogger(CSVLogger):
    """Stands for TensorBoardLogger, whose package may be missing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._log_graph = True


def all_metrics(trial: Trial) -> None:
    trainer = trial.trainer
    trainer.fit(trial.module, datamodule=trial.data)
    for name in ("logged_metrics", "progress_bar_metrics"):
        trial.record(**{name: {key: float(value) for key, value in getattr(trainer, name).items()}})


def read_files(trial: Trial) -> None:
    """What is in the folder of a CSVLogger."""
    trial.trainer.fit(trial.module, datamodule=trial.data)
    log_dir = Path(trial.trainer.log_dir or "")  # all ranks must ask
    if trial.trainer.is_global_zero:
        texts = {str(path.relative_to(trial.folder)): path.read_text() for path in trial.folder.rglob("*.*")}
        tables = {name: texts.pop(name) for name in sorted(texts) if name.endswith("metrics.csv")}
        for name, text in tables.items():
            trial.record(**{name: [[_number(cell) for cell in line.split(",")] for line in text.splitlines()]})
        trial.record(log_dir=log_dir.relative_to(trial.folder).parts, texts=dict(sorted(texts.items())))


def without_logger(trial: Trial) -> None:
    trial.trainer.fit(trial.module, datamodule=trial.data)
    log_dir = Path(trial.trainer.log_dir or "")
    trial.record(logger=trial.trainer.logger, log_dir=log_dir.relative_to(trial.folder).parts)


def experiment_of_other_ranks(trial: Trial) -> None:
    trial.trainer.fit(trial.module, datamodule=trial.data)
    experiment = trial.trainer.logger.experiment  # type: ignore[union-attr]
    assert isinstance(experiment, _DummyExperiment) == (not trial.trainer.is_global_zero)


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


FEATURES = [
    Feature("`self.log`: `on_step`, `on_epoch`, `prog_bar`, `logger`", module=LogsOptions, script=all_metrics),
    Feature("`self.log(reduce_fx=...)`: min, max, mean, sum", module=LogsReduced, script=all_metrics),
    Feature("`self.log_dict`, `batch_size=`", module=LogsDictionary, script=all_metrics),
    Feature(
        "`self.log` without `sync_dist`",
        module=LogsLocally,
        outcomes=on(Equal(), AsDDP()),
        note="the value of rank 0's samples",
    ),
    Feature(
        "`self.log(rank_zero_only=True)`",
        module=LogsOnRankZero,
        outcomes=on(Equal(), AsDDP()),
        note="the value of rank 0's samples",
    ),
    Feature("`self.log(add_dataloader_idx=False)`", module=LogsWithoutIndex, data=TwoOfEach),
    Feature("`self.log` and `logger.log_metrics` in hooks", module=LogsInHooks),
    Feature("`self.log` in callbacks", lambda _: {"callbacks": LogsFromCallback()}),
    Feature("torchmetrics: `MeanMetric`, `MetricCollection`, `compute` in a hook", module=LogsMetrics),
    Feature(
        "a metric logged with each step", module=StepMetric, outcomes=on(Equal(), AsDDP()), note="of rank 0's samples"
    ),
    Feature("`log_every_n_steps=2`", lambda _: {"log_every_n_steps": 2}),
    Feature(
        "`CSVLogger`",
        lambda folder: {"logger": CSVLogger(folder)},
        script=read_files,
        note="the files and `trainer.log_dir`",
    ),
    Feature("`logger=True`, the default", lambda _: {"logger": True}),
    Feature("`logger=False`", lambda _: {"logger": False}, script=without_logger),
    Feature(
        "several loggers",
        lambda folder: {"logger": [CSVLogger(folder), CSVLogger(folder, "other")]},
        script=read_files,
    ),
    Feature("`save_hyperparameters`", lambda folder: {"logger": CSVLogger(folder)}, module=Hyper, script=read_files),
    Feature("`logger.experiment` on other ranks", script=experiment_of_other_ranks, note="a dummy, as with DDP"),
    Feature(
        "`log_graph=True`",
        lambda folder: {"logger": GraphLogger(folder)},
        module=HasExample,
        outcomes=on(Refused("log_graph=True")),
    ),
]
