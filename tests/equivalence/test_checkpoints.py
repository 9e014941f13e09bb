"""A checkpoint of any layout has a single process's names, shapes and values."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import models
from tests.harness.checkpoints import read
from tests.harness.pool import Pool
from tests.harness.training import (
    Layout,
    Outcome,
    OutcomeCallback,
    Training,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
)

TRAININGS = {
    "mlp": Training(models.MLP, partial(models.vectors, (8, 8, 8)), torch.float64),
    "tied gpt": Training(models.gpt, partial(models.windows, (8, 8, 8)), torch.float64),
}
ALONE = Layout()
WAVE = Layout(2, 2, 1)
TOLERANCE = 1e-10


class Saver(OutcomeCallback):
    """Saves at the end of the training, on all ranks, as Lightning requires."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        trainer.save_checkpoint(self.path)


def train(
    training: Training, layout: Layout, epochs: int, path: Path, start: Path | None = None, *, save_full: bool = False
) -> Outcome:
    """Train to the end of an epoch, then save."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")  # the recipe's model has a validation_step
    saver = Saver(path)
    own = {"strategy": make_strategy(layout, loss_weight=training.loss_weight, save_full=True)} if save_full else {}
    trainer = make_trainer(layout, training.loss_weight, max_epochs=epochs, callbacks=[saver], **own)
    loader = make_loader(training.share(data_rank(layout), layout.data))
    trainer.fit(models.build(training.model, training.dtype), loader, ckpt_path=start)
    return saver.outcome


def assert_same(actual: Any, expected: Any, where: str = "checkpoint") -> None:
    """Both have the same structure, and the same numbers within the tolerance."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{where}[{index}]")
    elif isinstance(expected, Tensor):
        assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device), where
        assert torch.allclose(actual, expected, rtol=0, atol=TOLERANCE), where
    else:
        assert actual == expected, where


@pytest.mark.parametrize("kind", TRAININGS)
def test_file_equals_that_of_a_single_process(pool: Pool, tmp_path: Path, kind: str) -> None:
    training = TRAININGS[kind]
    pool.run(1, train, training, ALONE, 1, tmp_path / "alone.ckpt")
    pool.run(WAVE.world_size, partial(train, save_full=True), training, WAVE, 1, tmp_path / "pipeline.ckpt")
    alone, pipeline = (torch.load(tmp_path / name, weights_only=True) for name in ("alone.ckpt", "pipeline.ckpt"))
    assert alone.keys() <= pipeline.keys()
    for part in alone:
        assert_same(pipeline[part], alone[part], part)


class WithoutOptimizer(models.MLP):
    """Trains nothing, for example only to compute metrics."""

    def configure_optimizers(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("pipe", [1, 2])
def test_a_model_without_optimizer_is_saved_and_resumed(pool: Pool, tmp_path: Path, pipe: int) -> None:
    pool.run(pipe, train_without, Layout(pipe), tmp_path)
    pool.run(1, train_without, ALONE, tmp_path / "alone")
    for name in ("half.ckpt", "full.ckpt"):
        pipeline, alone = (read(tmp_path / folder / name) for folder in ("", "alone"))
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
            assert_same(pipeline[part], alone[part], part)


def train_without(layout: Layout, folder: Path) -> None:
    """Save, resume, and save again, with gradient clipping although there are no gradients."""
    warnings.filterwarnings("ignore", message=".*will run with no optimizer|.*no gradient clipping will occur")
    for epochs, name, start in ((1, "half.ckpt", None), (2, "full.ckpt", folder / "half.ckpt")):
        saver, options = Saver(folder / name), {"max_epochs": epochs, "gradient_clip_val": 0.1}
        strategy = "auto" if folder.name == "alone" else make_strategy(layout)
        trainer = make_trainer(layout, callbacks=[saver], strategy=strategy, **options)
        trainer.fit(models.build(WithoutOptimizer), make_loader(models.vectors((8, 8))), ckpt_path=start)
