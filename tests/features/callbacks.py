"""Features: Lightning's callbacks that stop, schedule, search, average and freeze."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from torch import nn

from tests.features.feature import AsDDP, Differs, Equal, Feature, Refused, RefusedByLightning, on
from tests.features.net import Net
from tests.features.trial import Trial, fit
from tests.features.with_callbacks import recording, with_callbacks


class Learns(Net):
    """Monitors a rate by a schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Finetuned(Net):
    """Its backbone is the stack and what is in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Any) -> Any:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class FinetunedLater(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class FreezesEmbedding(BaseFinetuning):
    """As its documentation shows: the embedding is trained from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.embedding)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.embedding, optimizer, lr=0.05)


class Spikes(Net):
    """The loss of one batch is much higher than those before it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return 50 * loss if self.global_step == 4 else loss


def spiking(trial: Trial) -> None:
    """The run ends on all ranks, and a file names the batches."""
    with pytest.raises(Exception, match="Training spike detected in batch 1"):
        fit(trial)
    trial.record(excluded=(trial.folder / "skip_batches.json").read_text() if trial.trainer.is_global_zero else None)


class Sized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2


FEATURES = [
    Feature(
        "`EarlyStopping`",
        with_callbacks(EarlyStopping("val_loss", patience=0), max_epochs=5),
        script=recording(EarlyStopping, "stopped_epoch", "best_score", "wait_count"),
    ),
    Feature(
        "`EarlyStopping` in training epochs, with a threshold",
        with_callbacks(
            EarlyStopping("train_loss_epoch", stopping_threshold=1.2, check_on_train_epoch_end=True), max_epochs=5
        ),
        script=recording(EarlyStopping, "stopped_epoch", "best_score"),
    ),
    Feature("`LearningRateMonitor`", with_callbacks(LearningRateMonitor(log_momentum=True)), module=Learns),
    Feature("`GradientAccumulationScheduler`", with_callbacks(GradientAccumulationScheduler({0: 1, 1: 3}))),
    Feature(
        "`LambdaCallback`",
        lambda _: {"callbacks": LambdaCallback(on_train_epoch_end=lambda trainer, module: module.log("seen", 1.0))},
    ),
    Feature("`Timer`", with_callbacks(Timer(timedelta(seconds=0)))),
    Feature("`DeviceStatsMonitor(cpu_stats=False)`", with_callbacks(DeviceStatsMonitor(cpu_stats=False))),
    Feature("`LearningRateFinder`", with_callbacks(LearningRateFinder(num_training_steps=20))),
    Feature(
        "`BatchSizeFinder`",
        with_callbacks(BatchSizeFinder(max_trials=2, init_val=2, steps_per_trial=2)),
        module=Sized,
        outcomes=on(Equal(), RefusedByLightning("not supported with distributed")),
    ),
    Feature("`EMAWeightAveraging`", with_callbacks(EMAWeightAveraging())),
    Feature("`WeightAveraging`", with_callbacks(WeightAveraging())),
    Feature(
        "`StochasticWeightAveraging`",
        with_callbacks(StochasticWeightAveraging(1e-2, swa_epoch_start=1), max_epochs=4),
    ),
    Feature(
        "`BackboneFinetuning`",
        with_callbacks(BackboneFinetuning(1, verbose=False), max_epochs=3),
        module=Finetuned,
    ),
    Feature(
        "a `BaseFinetuning` of the user's", with_callbacks(FreezesEmbedding(), max_epochs=3), module=FinetunedLater
    ),
    Feature(
        "`SpikeDetection`",
        with_callbacks(SpikeDetection()),
        script=recording(SpikeDetection, "last_val", "bad_batches"),
        outcomes=on(Equal(), AsDDP()),
        note="each data rank watches the losses of its own samples",
    ),
    Feature(
        "`SpikeDetection` that finds a spike",
        with_callbacks(SpikeDetection()),
        module=Spikes,
        script=spiking,
        outcomes=on(Differs(("callback metrics",))),
        note="the same batches; one rank raises its error, [others `PeerFailed`](../guides/faults.md); after the error "
        "`trainer.callback_metrics` has the epoch's means already",
    ),
    Feature(
        "`ModelPruning`",
        with_callbacks(ModelPruning("l1_unstructured", amount=0.5)),
        outcomes=on(Refused("the callback ModelPruning replaces parameters")),
    ),
]
