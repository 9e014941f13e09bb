"""Tries a feature on one rank: makes the Trainer, runs the user's script, and records what it leaves."""

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from tests.harness.models import build
from tests.harness.training import Layout, data_rank, make_strategy, own_weights

if TYPE_CHECKING:
    from tests.features.feature import Feature


@dataclass
class Records:
    """What a trial leaves: on one rank, or merged over all of them."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    """one per batch, of this data rank"""
    values: dict[str, Any] = field(default_factory=dict)
    """the same on all data ranks, or rank 0's; on pipeline ranks above 0 only what all ranks must have"""
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    """of this data rank's samples: sample i of the loader is sample i // D of data rank i mod D"""


class MemoryLogger(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    @property
    @rank_zero_experiment
    def experiment(self) -> list[Any]:
        return self.lines

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {name: float(value) for name, value in metrics.items() if not _is_time(name)}
        self.lines.append((step, values))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.lines.append(("hyperparameters", dict(params)))

    @rank_zero_only
    def log_graph(self, model: LightningModule, input_array: Tensor | None = None) -> None:
        self.lines.append("graph")

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.lines.append(("finalize", status))


def _is_time(name: str) -> bool:
    """Whether the values of this name are another number in each run."""
    return name.endswith("/time") or "per_sec" in name


class Losses(Callback):
    """Keeps the loss of each batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        if outputs:
            self.losses.append(float(outputs["loss"]))


@dataclass
class Trial:
    """One rank's trial of a feature: what a user's script has, and what it records."""

    feature: "Feature"
    layout: Layout
    kind: str
    folder: Path
    records: Records = field(default_factory=Records)

    def __post_init__(self) -> None:
        self._losses = Losses()
        self._logger = MemoryLogger()
        self.module = build(self.feature.module)
        self.data = self.feature.data(self.data_rank, self.layout.data)
        self.trainer = self.make_trainer(**self.feature.trainer(self.folder))

    @property
    def data_rank(self) -> int:
        """This process's place on the data axis."""
        return data_rank(self.layout)

    def make_trainer(self, **options: Any) -> Trainer:
        """A Trainer of two epochs that logs to memory, unless `options` say otherwise."""
        quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        usual: dict[str, Any] = {
            "default_root_dir": self.folder,
            "use_distributed_sampler": self.data.sampled_by_lightning,
        }
        if options.get("fast_dev_run"):
            usual |= quiet
        elif not options.get("barebones"):
            usual |= quiet | {"max_epochs": 2, "log_every_n_steps": 1, "logger": self._logger}
            usual |= {"enable_checkpointing": False}
        callbacks = options.pop("callbacks", [])
        strategy = make_strategy(self.layout, **self.feature.strategy) if self.kind == "hanayo" else self.kind
        return Trainer(
            accelerator="cpu",
            devices=self.layout.world_size,
            strategy=strategy,
            callbacks=[*(callbacks if isinstance(callbacks, list) else [callbacks]), self._losses],
            **usual | options,
        )

    def record(self, **values: Any) -> None:
        """Record what must be equal to one process's: on rank 0, or on all ranks that call it."""
        self.records.values |= values

    def record_samples(self, name: str, *parts: Tensor) -> None:
        """Record tensors of this data rank's samples, along dimension 0."""
        self.records.parts[name] = [part.detach().clone() for part in parts]

    def finish(self) -> Records:
        """What every trial records."""
        trainer, records = self.trainer, self.records
        records.weights = own_weights(self.module, trainer)
        records.losses = self._losses.losses
        records.values |= {
            "global step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "callback metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        }
        if trainer.is_global_zero:
            records.values["logger"] = self._logger.lines
        return records


def fit(trial: Trial) -> None:
    """What most scripts do."""
    trial.trainer.fit(trial.module, datamodule=trial.data)


def predict(trial: Trial, trainer: Trainer | None = None) -> None:
    """Predict, and record the predictions of each sample."""
    predictions = (trainer or trial.trainer).predict(trial.module, datamodule=trial.data)
    if predictions and isinstance(predictions[0], Tensor):
        trial.record_samples("predictions", *predictions)


def run_trial(find: Callable[[str], "Feature"], name: str, layout: Layout, kind: str, folder: str) -> Records:
    """Try the feature `find(name)` on one rank; `kind` is the strategy: "hanayo", "ddp" or "auto"."""
    feature = find(name)
    try:
        with warnings.catch_warnings(), patch.object(tempfile, "tempdir", folder):  # other tests share the process
            warnings.simplefilter("ignore")
            trial = Trial(feature, layout, kind, Path(folder))
            feature.script(trial)
            return trial.finish()
    finally:
        torch.set_default_dtype(torch.float32)
