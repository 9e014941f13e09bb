"""What modules and callbacks do with a checkpoint that is being loaded, on ranks that each read a part of it.

checkpoint of a plain Trainer, as a file or a folder   ->   trainer.validate(..., ckpt_path=it)   ->   weights
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    assert_bit_equal,
    make_loader,
    make_strategy,
    make_trainer,
    merge_owned,
    own_weights,
)
from tests.strategy.checkpoints.as_folder import as_folder

Checkpoint = dict[str, Any]
Weights = dict[str, Tensor]


class Validated(models.MLP):
    """The MLP with a validation step."""

    def validation_step(self, batch: models.Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class Reads(Validated):
    """Looks at values, and at all shapes."""

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        state = checkpoint["state_dict"]
        assert sum(value.numel() for value in state.values()) == sum(p.numel() for p in self.parameters())
        assert all(value.shape == self.state_dict()[name].shape for name, value in state.items())
        assert 0 < float(state["blocks.5.up.weight"].norm()) < 100
        assert torch.equal(state["head.weight"][1:3].mean(1), state["head.weight"].mean(1)[1:3])


class Renames(Validated):
    """Knows an older name of a part of the model."""

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        state = {f"old.{name}": value for name, value in checkpoint["state_dict"].items()}
        checkpoint["state_dict"] = {name.removeprefix("old."): value for name, value in state.items()}


class Deletes(Validated):
    """Takes all but the head."""

    strict_loading = False  # type: ignore[assignment]

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        for name in [name for name in checkpoint["state_dict"] if name.startswith("head.")]:
            del checkpoint["state_dict"][name]


class Replaces(Validated):
    """Doubles a matrix of the second rank in place, sets a bias, and leaves out what it has added."""

    strict_loading = False  # type: ignore[assignment]

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        state = checkpoint["state_dict"]
        state["blocks.3.up.weight"].mul_(2)
        state["head.bias"] = torch.ones_like(state["head.bias"])
        state["added"] = torch.zeros(3)


class Exchanges(Validated):
    """Takes averaged weights, which are stored under another key, in place of the last ones."""

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        checkpoint["state_dict"] = checkpoint["ema"]


class LoadsLate(Callback):
    """Gives the module other values once Lightning has loaded the state dict, as callbacks that average weights do."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Checkpoint) -> None:
        pl_module.load_state_dict(checkpoint["ema"])


def unchanged(weights: Weights, _: Weights) -> Weights:
    return weights


def averaged(weights: Weights, _: Weights) -> Weights:
    return {name: value + 1 for name, value in weights.items()}


def with_other_head(weights: Weights, initial: Weights) -> Weights:
    return weights | {name: initial[name] for name in ("head.weight", "head.bias")}


def doubled(weights: Weights, _: Weights) -> Weights:
    name = "blocks.3.up.weight"
    return weights | {name: 2 * weights[name], "head.bias": torch.ones(models.CLASSES)}


HABITS: dict[type[Validated] | type[Callback], Callable[[Weights, Weights], Weights]] = {
    Reads: unchanged,
    Renames: unchanged,
    Deletes: with_other_head,
    Replaces: doubled,
    Exchanges: averaged,
    LoadsLate: averaged,
}
LAYOUTS = [Layout(2, 2, 1), Layout(1, cube=(1, 2, 1)), Layout(2, 1, 1, cube=(1, 1, 2)), Layout()]


def save(folder: Path) -> Weights:
    """Both kinds of checkpoint, and the weights in them."""
    trainer = make_trainer(Layout(), max_epochs=1)
    module = models.build(models.MLP)
    trainer.fit(module, make_loader(models.vectors((8,))))
    trainer.save_checkpoint(folder / "plain")
    checkpoint = torch.load(folder / "plain", weights_only=True)
    checkpoint["ema"] = averaged(checkpoint["state_dict"], {})
    torch.save(checkpoint, folder / "plain")
    as_folder(checkpoint, folder / "folder", models.optimizer_names(module))
    return dict(checkpoint["state_dict"])


class Weighs(Callback):
    """Copies what this rank owns once values are loaded."""

    def __init__(self) -> None:
        self.weights: Weights = {}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = own_weights(pl_module, trainer)


def loaded(layout: Layout, path: Path, habits: list[Any]) -> list[Weights]:
    """The weights of this rank after each of the habits."""
    warnings.filterwarnings("ignore", message=".*(not in the checkpoint|not in the model|many workers)")
    found = []
    for habit in habits:
        weighs = Weighs()
        is_module = issubclass(habit, LightningModule)
        callbacks = [weighs, *([] if is_module else [habit()])]
        trainer = make_trainer(layout, strategy=make_strategy(layout), callbacks=callbacks)
        module = models.build(habit if is_module else Validated)
        trainer.validate(module, make_loader(models.vectors((8,))), ckpt_path=path, verbose=False)
        found.append(weighs.weights)
    return found


CASES = [(layout, kind) for layout in LAYOUTS for kind in ("plain", "folder")]
COVER = [(LAYOUTS[0], "folder")]


@pytest.mark.parametrize(("layout", "kind"), covered(CASES, by=COVER), ids=str)
def test_hooks_change_what_is_loaded(pool: Pool, tmp_path: Path, layout: Layout, kind: str) -> None:
    (weights,) = pool.run(1, save, tmp_path)
    initial = dict(models.build(Validated).state_dict())
    ranks = pool.run(layout.world_size, loaded, layout, tmp_path / kind, list(HABITS))
    pipelines = layout.topology.groups("pipe")
    for index, expected in enumerate(HABITS.values()):
        for pipeline in pipelines:
            found = merge_owned([ranks[rank][index] for rank in pipeline])
            assert_bit_equal(found, expected(weights, initial))
