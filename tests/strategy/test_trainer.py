"""Trainer's options and loops lead to the same weights and metrics as in one process, on every rank.

run(trainer, loaders) -> weights after it, callback_metrics after it
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_hanayo.schedule import build
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    assert_bit_equal,
    assert_close,
    make_loader,
    make_trainer,
    merge_owned,
    own_weights,
)

WAVE = Layout(2, 2, 1)


class Model(models.MLP):
    """Validates, tests and predicts too; a schedule per step."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch["x"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Plateau(Model):
    """Halves its rate by a metric of the step."""

    def configure_optimizers(self) -> Any:
        optimizer = models.MLP.configure_optimizers(self)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        scheduler = {"scheduler": plateau, "interval": "step", "frequency": 2, "monitor": "train_loss"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class LogsInHooks(Model):
    """On all ranks, some with sync_dist."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("start", 3.0, on_step=True, on_epoch=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("before", 1.0, sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("end", torch.tensor(2.0))


class Counts(Model):
    """Plans its schedule with the number of steps, which it asks for as soon as it can."""

    def setup(self, stage: str) -> None:
        self.early = self.trainer.estimated_stepping_batches if stage == "fit" else None

    def configure_optimizers(self) -> Any:
        optimizer = models.MLP.configure_optimizers(self)
        assert self.early == self.trainer.estimated_stepping_batches
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=int(self.early))
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


class CountsEarly(Callback):
    def __init__(self) -> None:
        self.steps: float = 0

    def setup(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self.steps = trainer.estimated_stepping_batches


class TwoLoaders(Model):
    def training_step(self, batch: dict[str, Batch], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch["a"]) + self.head.weight.sum() * batch["b"]["x"].mean()


class Reads(Callback):
    """What a user's callback reads at each step, on every rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


class Stream(IterableDataset[Batch]):
    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        yield from self.batches


def batches(*sizes: int) -> list[Batch]:
    return models.vectors(sizes or (8, 8, 8, 8), torch.float64)


def loader(*sizes: int) -> Any:
    return make_loader(batches(*sizes))


def stream(num_workers: int = 0) -> Any:
    return DataLoader(Stream(batches()), batch_size=None, num_workers=num_workers)


Run = Callable[[Callable[..., Trainer], LightningModule, Path], Any]


def fit(model: type[LightningModule] = Model, **options: Any) -> Run:
    """A fit with `options`, validated on two batches."""
    return partial(_fit, model, options)


def _fit(model: type[LightningModule], options: dict[str, Any], trainer: Any, module: LightningModule, _: Path) -> None:
    trainer(**{"max_epochs": 2, **options}).fit(models.build(model, torch.float64), loader(), loader(8, 5))


def every_loop(trainer: Any, module: LightningModule, _: Path) -> Any:
    first = trainer(max_steps=3)
    before = first.validate(module, loader(), verbose=False)
    first.fit(module, loader(), loader(8, 5))
    predicted = first.predict(module, loader(8, 3))
    return (
        before,
        first.test(module, loader(), verbose=False),
        first.validate(module, loader(5), verbose=False),
        predicted,
    )


def two_fits(trainer: Any, module: LightningModule, _: Path) -> None:
    for _again in range(2):
        trainer(max_steps=3).fit(module, loader(), loader(8))
    again = trainer(max_epochs=1)
    again.fit(module, loader(), loader(8))
    again.fit_loop.max_epochs = 2
    again.fit(module, loader(), loader(8))


class Deep(Model):
    """Of another class and depth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(models.Block() for _ in range(3))


def two_modules(trainer: Any, module: LightningModule, _: Path) -> Any:
    """One after the other with one Trainer, and the first one once more."""
    other, weights = models.build(Deep, torch.float64), []
    one = trainer(max_epochs=0)
    for turn, own in enumerate((module, other, module, other), 1):
        one.fit_loop.max_epochs = turn
        one.fit(own, loader(), loader(8))
        weights.append(own_weights(own, one))
    return weights


def several_validations(trainer: Any, module: LightningModule, _: Path) -> None:
    trainer(max_epochs=1).fit(module, loader(), [loader(8), loader(5, 3)])


def combined(trainer: Any, module: LightningModule, _: Path) -> None:
    both = CombinedLoader({"a": loader(), "b": loader(8, 8, 8)}, "min_size")
    trainer(max_epochs=2).fit(models.build(TwoLoaders, torch.float64), both, loader(8))


def streams(trainer: Any, module: LightningModule, _: Path, num_workers: int = 0) -> None:
    trainer(max_epochs=2, limit_val_batches=3).fit(module, stream(num_workers), stream(num_workers))


def workers(trainer: Any, module: LightningModule, _: Path) -> None:
    several = DataLoader(batches(), batch_size=None, num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    trainer(max_epochs=2).fit(module, several, several)


def checkpoints(trainer: Any, module: LightningModule, folder: Path) -> Any:
    saving = ModelCheckpoint(folder, "{step}", monitor="train_loss", every_n_train_steps=2, save_top_k=2)
    reads = Reads()
    trainer(max_steps=8, callbacks=[saving, reads], enable_checkpointing=True).fit(module, loader(), loader(8))
    return sorted(Path(path).name for path in saving.best_k_models), Path(saving.best_model_path).name, reads.losses


def logged(trainer: Any, module: LightningModule, folder: Path) -> None:
    module.example_input_array = torch.zeros(2, models.WIDTH, dtype=torch.float64)
    monitor = LearningRateMonitor()
    options = {"enable_progress_bar": True, "enable_model_summary": True, "profiler": "simple", "log_every_n_steps": 1}
    trainer(max_steps=3, logger=CSVLogger(folder), callbacks=[monitor], **options).fit(module, loader(), loader(8))


def reloaded(trainer: Any, module: LightningModule, _: Path) -> None:
    module.train_dataloader = lambda: loader(*[8] * (1 + module.current_epoch))  # type: ignore[method-assign]
    trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module, val_dataloaders=loader(8))


def cut(balance: Any, trainer: Any, module: LightningModule, _: Path) -> None:
    module.example_input_array = torch.zeros(2, models.WIDTH, dtype=torch.float64)
    trainer(max_steps=3, balance=balance).fit(module, loader(), loader(8))


def interleaved(trainer: Any, module: LightningModule, _: Path) -> None:
    trainer(max_steps=3, num_waves="auto", schedule="interleaved").fit(module, loader(), loader(8))


def table(trainer: Any, module: LightningModule, folder: Path) -> None:
    path = folder / f"table{os.environ['RANK']}.csv"
    build("hanayo", num_ranks=2, num_microbatches=4, num_waves=2).to_csv(path)
    trainer(max_steps=3, schedule=str(path), num_waves=1).fit(module, loader(8, 8, 3), loader(8))


def steps_counted(trainer: Any, module: LightningModule, _: Path, *, streams: bool = False) -> Any:
    counts, own = CountsEarly(), models.build(Model if streams else Counts, torch.float64)
    options = {"max_epochs": 2} | ({"max_steps": 5} if streams else {"accumulate_grad_batches": 3})
    trainer(callbacks=[counts], limit_val_batches=2, **options).fit(own, stream() if streams else loader(), loader(8))
    return counts.steps


RUNS: dict[str, Run] = {
    "every loop": every_loop,
    "two fits": two_fits,
    "two modules": two_modules,
    "an odd end while accumulating": fit(accumulate_grad_batches=3),
    "accumulation by epoch": fit(callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})]),
    "overfit": fit(overfit_batches=2),
    "limits": fit(limit_train_batches=0.5, limit_val_batches=1),
    "validation in between": fit(val_check_interval=0.5, accumulate_grad_batches=2),
    "validation every other epoch": fit(check_val_every_n_epoch=2),
    "fast dev run": fit(fast_dev_run=2),
    "anomalies": fit(detect_anomaly=True, max_epochs=1),
    "clipped by value": fit(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "plateau per step": fit(Plateau),
    "logs in hooks": fit(LogsInHooks),
    "several validation loaders": several_validations,
    "combined loaders": combined,
    "streams": streams,
    "streams with workers": partial(streams, num_workers=1),
    "loaders with workers": workers,
    "checkpoints by step": checkpoints,
    "loggers and bars": logged,
    "reloaded loaders": reloaded,
    "balance by time": partial(cut, "time"),
    "balance by hand": partial(cut, [3.0, 1, 1, 1, 1, 1, 1, 1]),
    "interleaved": interleaved,
    "a table from a file": table,
    "steps counted at set-up": steps_counted,
    "steps of a stream counted at set-up": partial(steps_counted, streams=True),
}


def play(kind: str, layout: Layout, folder: Path) -> dict[str, Any]:
    """One rank's part of a run, and what it leads to."""
    warnings.filterwarnings("ignore", message=".*turned on `Trainer\\(overfit_batches|.*Anomaly|.*overfit")
    made: list[Trainer] = []

    def trainer(**options: Any) -> Trainer:
        own = {name: options.pop(name) for name in ("balance", "schedule", "num_waves") if name in options}
        strategy = {"strategy": make_strategy(layout, own)} if layout.world_size > 1 else {}
        made.append(make_trainer(layout, **strategy, **options))
        return made[-1]

    returned = RUNS[kind](trainer, models.build(Model, torch.float64), folder)
    metrics = {name: float(value) for name, value in made[-1].callback_metrics.items()}
    return {"weights": own_weights(made[-1].lightning_module), "metrics": metrics, "returned": returned}


def make_strategy(layout: Layout, options: dict[str, Any]) -> Any:
    from lightning_hanayo import HanayoStrategy

    own = {"num_waves": layout.waves, "num_microbatches": layout.num_microbatches, "schedule": layout.schedule}
    return HanayoStrategy(pipeline_parallel_size=layout.pipe, **(own | options))


RARE = (
    "streams with workers", "two modules", "balance by time", "steps of a stream counted at set-up", "overfit",
    "fast dev run", "clipped by value", "plateau per step", "combined loaders", "validation every other epoch",
    "accumulation by epoch", "checkpoints by step", "limits", "anomalies", "logs in hooks", "reloaded loaders",
    "balance by hand", "a table from a file", "steps counted at set-up", "an odd end while accumulating", "interleaved",
    "several validation loaders", "validation in between",
)  # fmt: skip


@pytest.mark.parametrize("kind", covered(RUNS, by=[kind for kind in RUNS if kind not in RARE]))
def test_same_weights_and_metrics(pool: Pool, tmp_path: Path, kind: str) -> None:
    for name in ("alone", "ours"):
        (tmp_path / name).mkdir()
    (alone,) = pool.run(1, play, kind, Layout(), tmp_path / "alone")
    ranks = pool.run(2, play, kind, WAVE, tmp_path / "ours")
    assert_close(merge_owned([rank["weights"] for rank in ranks]), alone["weights"], 1e-10)
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(alone["metrics"], rel=1e-9), kind
    if kind == "every loop":
        torch.testing.assert_close(ranks[0]["returned"][3], alone["returned"][3], rtol=0, atol=1e-10)
        assert ranks[1]["returned"][3] == [None, None], "rank 0 has the predictions"
        for rank in ranks:
            for ours, theirs in zip(rank["returned"][:3], alone["returned"][:3], strict=True):
                assert ours == [pytest.approx(theirs[0], rel=1e-9)]
    if kind == "two modules":
        for turn, expected in enumerate(alone["returned"]):
            assert_close(merge_owned([rank["returned"][turn] for rank in ranks]), expected, 1e-10)
    if kind.startswith("steps"):
        assert [rank["returned"] for rank in ranks] == [alone["returned"]] * 2
    if kind == "checkpoints by step":
        for rank in ranks:
            assert rank["returned"][:2] == alone["returned"][:2]
            assert rank["returned"][2] == pytest.approx(alone["returned"][2], rel=1e-9)


class Direct(Model):
    """Nothing of ours lies between its step and its blocks."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert threading.current_thread() is threading.main_thread()
        assert all("forward" not in vars(block) for block in self.blocks)
        return super().training_step(batch, batch_idx)


def one_device(ours: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    from lightning_hanayo import HanayoStrategy

    strategy = HanayoStrategy() if ours else "auto"
    module = models.build(Direct, torch.float64)
    trainer = make_trainer(Layout(), strategy=strategy, devices=1, max_steps=6, gradient_clip_val=0.1)
    trainer.fit(module, loader(), loader(8, 5))
    return own_weights(module), trainer.callback_metrics


def test_one_device_is_a_plain_run_to_the_last_bit(pool: Pool) -> None:
    (ours,) = pool.run(1, one_device, True)
    (alone,) = pool.run(1, one_device, False)
    for found, expected in zip(ours, alone, strict=True):
        assert_bit_equal(found, expected)


class Lags(Callback):
    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank:
            time.sleep(1.0)


def lagging() -> None:
    module = models.build(Model, torch.float64)
    make_trainer(WAVE, max_epochs=1, callbacks=[Lags()]).fit(module, loader(), loader(8))


def test_rank_0_doesnt_leave_before_the_others_know_its_metrics(pool: Pool) -> None:
    pool.run(2, lagging)


def two_modules_in_a_cube(layout: Layout) -> Any:
    return two_modules(partial(make_trainer, layout), models.build(Model, torch.float64), Path())


@pytest.mark.thorough
def test_two_modules_in_a_cube(pool: Pool) -> None:
    (alone,) = pool.run(1, two_modules_in_a_cube, Layout())
    for weights in pool.run(2, two_modules_in_a_cube, Layout(cube=(1, 2, 1))):
        for own, expected in zip(weights, alone, strict=True):
            assert_close(own, expected, 1e-10)
