"""Lightning's other callbacks, and the hooks around a backward, do on all ranks what they do in one process."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    Timer,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    assert_close,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
    own_weights,
)

LAYOUTS = {
    "pipeline": Layout(2, 1, 1),
    "pipelines": Layout(2, 1, 2),
    "cube and pipeline": Layout(2, 1, 1, cube=(1, 2, 1)),
}
Seen = list[Any]
"""what a run notes of a callback, rounded"""


class Scheduled(models.MLP):
    """Its validation loss rises at last; it has a schedule."""

    def validation_step(self, batch: models.Batch, batch_idx: int) -> None:
        self.log("val_loss", (self.current_epoch - 2) ** 2 + self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Hooked(Scheduled):
    """Overrides what happens between a step and the next."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Seen = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append(("before backward", float(loss.detach()) > 0))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(2 * loss, *args, **kwargs)

    def on_after_backward(self) -> None:
        self.calls.append(("gradients", all(p.grad is not None for p in self.parameters() if not p.is_meta)))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("before zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(round(float(clip_grad_norm_(self.parameters(), 0.5)), 3))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        if batch_idx != 1:
            optimizer.step(closure=closure)
        else:
            self.calls.append(("skipped", float(closure()) > 0))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append(scheduler.get_last_lr())
        scheduler.step()


class Spiky(Scheduled):
    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return 100 * loss if self.global_step == 5 else loss


def of_early_stopping(trainer: Trainer, callback: Any) -> Seen:
    return [callback.stopped_epoch, callback.wait_count, round(float(callback.best_score), 4), trainer.current_epoch]


def of_rates(trainer: Trainer, callback: Any) -> Seen:
    return [{name: [round(rate, 6) for rate in rates] for name, rates in callback.lrs.items()}]


def of_steps(trainer: Trainer, callback: Any) -> Seen:
    return [trainer.global_step, trainer.accumulate_grad_batches]


def of_device(trainer: Trainer, callback: Any) -> Seen:
    return [any("DeviceStatsMonitor" in name for name in trainer.logged_metrics)]


def of_spike(trainer: Trainer, callback: Any) -> Seen:
    return [trainer.global_step, callback.bad_batches]


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Trainer, Any], Seen]]] = {
    "early stopping": (Scheduled, partial(EarlyStopping, "val_loss", patience=1, min_delta=0.01), of_early_stopping),
    "stops at a threshold": (Scheduled, partial(EarlyStopping, "val_loss", stopping_threshold=2.9), of_early_stopping),
    "stops of divergence": (Scheduled, partial(EarlyStopping, "val_loss", divergence_threshold=4.0), of_early_stopping),
    "stops after an epoch": (
        Scheduled,
        partial(EarlyStopping, "val_loss", patience=0, mode="max", check_on_train_epoch_end=True),
        of_early_stopping,
    ),
    "learning rates": (
        Scheduled,
        partial(LearningRateMonitor, "epoch", log_momentum=True, log_weight_decay=True),
        of_rates,
    ),
    "accumulation": (Scheduled, partial(GradientAccumulationScheduler, {1: 2, 2: 3}), of_steps),
    "time": (Scheduled, partial(Timer, timedelta(0), interval="step"), of_steps),
    "device": (Scheduled, partial(DeviceStatsMonitor, cpu_stats=True), of_device),
    "spikes": (Spiky, partial(SpikeDetection, warmup=2, atol=10.0), of_spike),
    "hooks": (Hooked, Callback, lambda trainer, callback: trainer.lightning_module.calls),
}


def train(name: str, layout: Layout | None, folder: Path) -> tuple[dict[str, Tensor], Seen]:
    """Train up to four epochs; None: with a plain Trainer."""
    for message in ("many workers", "is not empty", "lower value for log_every", "overriding", "lr_scheduler.step"):
        warnings.filterwarnings("ignore", message=f".*{message}")
    model, make_callback, note = CASES[name]
    callback = make_callback()
    rank, size = (0, 1) if layout is None else (data_rank(layout), layout.data)
    batches = [{key: value[rank::size] for key, value in one.items()} for one in models.vectors((8, 8, 8, 8))]
    strategy = {} if layout is None else {"strategy": make_strategy(layout)}
    logger = CSVLogger(folder)
    options = {"callbacks": [callback], "max_epochs": 4, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
    trainer = make_trainer(layout or Layout(), logger=logger, default_root_dir=folder, **options, **strategy)
    module, loader = models.build(model), make_loader(batches)
    try:
        trainer.fit(module, loader, loader)
    except TrainingSpikeException:
        return {}, [*note(trainer, callback), "spike"]
    return own_weights(module, trainer), note(trainer, callback)


ROWS = [(name, layout) for name in CASES for layout in LAYOUTS]


@pytest.mark.parametrize(("name", "layout"), covered(ROWS, by=[("spikes", "pipeline")]))
def test_callbacks_do_what_they_do_in_one_process(pool: Pool, tmp_path: Path, name: str, layout: str) -> None:
    ((weights, seen),) = pool.run(1, train, name, None, tmp_path)
    ranks = pool.run(LAYOUTS[layout].world_size, train, name, LAYOUTS[layout], tmp_path)
    for _, found in ranks:
        assert found == seen
    merged = {key: value for own, _ in ranks for key, value in own.items()}
    assert_close(merged, weights, 2e-5)  # a spike makes rounding errors larger
