"""Features: Lightning's callbacks that stop, schedule, search, average and freeze."""

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from torch import nn

from tests.features.feature import Equal, Feature, Refused, RefusedByLightning, on
from tests.features.net import Net
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
        "`ModelPruning`",
        with_callbacks(ModelPruning("l1_unstructured", amount=0.5)),
        outcomes=on(Refused("the callback ModelPruning replaces parameters")),
    ),
]
