"""A checkpoint is loaded into a module in any state: whole, cut by an earlier run, running, or without values.

fit, save          validate(ckpt_path)      fit(ckpt_path)      a hook of the run      another Trainer's layout
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    OutcomeCallback,
    assert_bit_equal,
    make_loader,
    make_strategy,
    make_trainer,
    merge_owned,
    own_weights,
)
from tests.strategy.checkpoints.as_folder import as_folder
from tests.strategy.checkpoints.test_load_habits import Validated, Weighs

Weights = dict[str, Tensor]
WAVE = Layout(2, 2, 1)
CUBE = Layout(1, cube=(1, 2, 1))


def save(folder: Path) -> tuple[Weights, Weights]:
    """A plain Trainer's checkpoint after an epoch, as a folder, too; the weights then and after another epoch."""
    outcome = OutcomeCallback()
    module, loader = models.build(models.MLP), make_loader(models.vectors((8,)))
    trainer = make_trainer(Layout(), max_epochs=1)
    trainer.fit(module, loader)
    trainer.save_checkpoint(folder / "plain")
    make_trainer(Layout(), max_epochs=2, callbacks=[outcome]).fit(module, loader, ckpt_path=folder / "plain")
    checkpoint = torch.load(folder / "plain", weights_only=True)
    as_folder(checkpoint, folder / "folder", models.optimizer_names(module))
    return dict(checkpoint["state_dict"]), outcome.outcome.weights


def trainer_of(layout: Layout, *callbacks: Callback, epochs: int = 1) -> Trainer:
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")
    return make_trainer(layout, strategy=make_strategy(layout), callbacks=list(callbacks), max_epochs=epochs)


def loader() -> Any:
    return make_loader(models.vectors((8,)))


def in_validate_after_fit(layout: Layout, path: Path) -> list[Weights]:
    weighs = Weighs()
    trainer, module = trainer_of(layout, weighs), models.build(Validated)
    trainer.fit(module, loader())
    trainer.validate(module, loader(), ckpt_path=path, verbose=False)
    return [weighs.weights]


def in_a_second_fit(layout: Layout, path: Path) -> list[Weights]:
    outcome = OutcomeCallback()
    module = models.build(models.MLP)
    trainer_of(layout, epochs=3).fit(module, loader())
    trainer_of(layout, outcome, epochs=2).fit(module, loader(), ckpt_path=path)
    return [{}, outcome.outcome.weights]


def on_another_layout(layout: Layout, path: Path) -> list[Weights]:
    outcome, other = OutcomeCallback(), CUBE if layout == WAVE else WAVE
    module = models.build(models.MLP)
    trainer_of(other).fit(module, loader())
    trainer_of(layout, outcome, epochs=2).fit(module, loader(), ckpt_path=path)
    return [{}, outcome.outcome.weights]


class GoesBack(Callback):
    """Loads a checkpoint while a run goes on, as one that takes back a bad step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: Weights = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        checkpoint = trainer.strategy.load_checkpoint(self.path)
        trainer.strategy.load_model_state_dict(checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        self.weights = own_weights(pl_module, trainer)


def in_a_hook(layout: Layout, path: Path) -> list[Weights]:
    back = GoesBack(path)
    trainer_of(layout, back).fit(models.build(models.MLP), loader())
    return [back.weights]


class ReadsAtOnce(Callback):
    """Saves in the background, and loads what is still being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_there = False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)
        self.is_there = trainer.strategy.load_checkpoint(self.path)["global_step"] == trainer.global_step


def in_background(folder: Path) -> list[bool]:
    reads = ReadsAtOnce(folder / "in_run")
    strategy = make_strategy(WAVE, save_async=True)
    trainer = make_trainer(WAVE, strategy=strategy, callbacks=[reads], max_epochs=1)
    trainer.fit(models.build(models.MLP), loader())
    trainer.save_checkpoint(folder / "after_fit")
    return [reads.is_there, (folder / "after_fit" / "manifest.json").exists()]


def test_what_is_still_being_written_is_waited_for(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, in_background, tmp_path) == [[True, True]] * 2


class Unset(nn.Module):
    """Has a parameter that nothing but a checkpoint gives values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(models.CLASSES, models.WIDTH))
        self.bias = nn.Parameter(torch.empty(models.CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Deferred(models.MLP):
    """Is built on the meta device."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()
            self.head = Unset()


def into_a_model_without_values(layout: Layout, path: Path) -> list[Weights]:
    outcome, weighs = OutcomeCallback(), Starts()
    trainer_of(layout, outcome, weighs, epochs=2).fit(Deferred(), loader(), ckpt_path=path)
    return [weighs.weights, outcome.outcome.weights]


class Starts(Callback):
    """Copies what this rank has when the fit starts: setup has put the values in already."""

    def __init__(self) -> None:
        self.weights: Weights = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = own_weights(pl_module, trainer)


CALLS: list[Callable[[Layout, Path], list[Weights]]] = [
    in_validate_after_fit,
    in_a_second_fit,
    on_another_layout,
    in_a_hook,
    into_a_model_without_values,
]
CASES = [(layout, kind) for layout in (WAVE, CUBE) for kind in ("plain", "folder")]


def all_of(layout: Layout, path: Path) -> list[list[Weights]]:
    return [call(layout, path) for call in CALLS]


@pytest.mark.parametrize(("layout", "kind"), covered(CASES, by=[(WAVE, "folder")]), ids=str)
def test_it_is_loaded(pool: Pool, tmp_path: Path, layout: Layout, kind: str) -> None:
    ((saved, resumed),) = pool.run(1, save, tmp_path)
    ranks = pool.run(2, all_of, layout, tmp_path / kind)
    (pipeline,) = layout.topology.groups("pipe") if layout.pipe > 1 else ((0,),)
    for index, call in enumerate(CALLS):
        loaded, *later = (
            merge_owned([ranks[rank][index][when] for rank in pipeline]) for when in range(len(ranks[0][index]))
        )
        if loaded:
            assert_bit_equal(loaded, saved)
        for weights in later:
            torch.testing.assert_close(weights, resumed, rtol=0, atol=1e-5, msg=call.__name__)
