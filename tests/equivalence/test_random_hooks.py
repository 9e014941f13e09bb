"""Hooks that run on all ranks draw the same random numbers on each of them, and those of one process.

rank 0    reads data: draws    on_train_epoch_start: draws 2    freezes block 2
rank 1                         on_train_epoch_start: draws 2    freezes block 2
"""

import os
import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.harness import models
from tests.harness.models import NUM_BLOCKS, Batch
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Outcome, OutcomeCallback, assert_close, make_trainer, merge

ONE_PROCESS = Layout()


class Samples(Dataset[Batch]):
    """Reading a sample draws from all generators, as augmentations do."""

    def __init__(self, count: int) -> None:
        (self.samples,) = models.vectors((count,), torch.float64)

    def __len__(self) -> int:
        return len(self.samples["x"])

    def __getitem__(self, index: int) -> Batch:
        factor = 1 + 0.1 * sum(numbers())
        return {"x": factor * self.samples["x"][index], "y": self.samples["y"][index]}


class Drawing(models.MLP):
    """Draws in hooks between the batches, too, and where only one rank of all, or of a pipeline, runs user code."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def note(self, *_: Any, **__: Any) -> None:
        self.seen.append(numbers())

    setup = on_fit_start = on_train_start = on_train_batch_start = on_before_optimizer_step = note
    on_train_batch_end = on_validation_start = on_validation_batch_start = on_validation_end = note
    on_train_epoch_start = on_train_epoch_end = on_train_end = note

    def prepare_data(self) -> None:
        numbers()

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch | {"x": batch["x"] + 0.1 * torch.randn_like(batch["x"])}

    def on_validation_epoch_end(self) -> None:
        numbers()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.loss(batch)


class ChangesWeights(models.MLP):
    """Freezes a random block in each epoch, and gives others new values and noise. No hook runs between the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append(frozen := random.randrange(NUM_BLOCKS))
        for index, block in enumerate(self.blocks):
            block.requires_grad_(index != frozen)
            for part in (block.up, block.down):
                part.reset_parameters()
            (nn.init.trunc_normal_, nn.init.orthogonal_)[index % 2](block.up.weight.data)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        self.seen.append(numbers())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.loss(batch)


def numbers() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.randn())]


def fit(
    model: Any, layout: Layout, folder: Path | None = None, resume: Path | None = None
) -> tuple[list[Any], Outcome]:
    """What the hooks have drawn on this rank, and the outcome."""
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists")  # where the resumed run saves, too
    callback = OutcomeCallback()
    saving = [] if folder is None else [ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)]
    trainer = make_trainer(
        layout, max_epochs=3, callbacks=[callback, *saving], enable_checkpointing=bool(saving), num_sanity_val_steps=1
    )
    module: LightningModule = models.build(model, torch.float64)
    lightning.seed_everything(7 if resume is None else 8, verbose=False)
    numbers()  # a module that is built draws, too
    try:
        training = DataLoader(Samples(16), batch_size=8, shuffle=True)
        trainer.fit(module, training, DataLoader(Samples(8), batch_size=4), ckpt_path=resume)
    finally:
        for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
            os.environ.pop(name, None)
    return module.seen, callback.outcome  # type: ignore[return-value]


PIPELINE, CUBE = Layout(2, 1, 1), Layout(1, 1, 1, cube=(1, 2, 1))
HOOKED = [(Drawing, PIPELINE), (Drawing, CUBE), (ChangesWeights, PIPELINE)]


@pytest.mark.parametrize(
    ("model", "layout"),
    covered(HOOKED, by=[(Drawing, PIPELINE), (ChangesWeights, PIPELINE)]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_hooks_draw_the_numbers_of_one_process(pool: Pool, model: Any, layout: Layout) -> None:
    ((seen, expected),) = pool.run(1, fit, model, ONE_PROCESS)
    ranks = pool.run(layout.world_size, fit, model, layout)
    assert [numbers for numbers, _ in ranks] == [seen] * layout.world_size
    outcome = merge([outcome for _, outcome in ranks], layout)
    assert_close(outcome.weights, expected.weights, 1e-9)
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-9)


@pytest.mark.thorough
def test_each_data_rank_draws_as_without_a_pipeline(pool: Pool) -> None:
    alone, pipelines = Layout(1, 1, 2), Layout(2, 1, 2)
    expected = [seen for seen, _ in pool.run(2, fit, Drawing, alone)]
    ranks = [seen for seen, _ in pool.run(4, fit, Drawing, pipelines)]
    assert ranks == [expected[0]] * 2 + [expected[1]] * 2


@pytest.mark.thorough
def test_a_resumed_run_draws_what_an_uninterrupted_one_does(pool: Pool, tmp_path: Path) -> None:
    run = partial(pool.run, 2, fit, Drawing, PIPELINE)
    (seen, _), _ = run(tmp_path)
    ranks = [seen for seen, _ in run(tmp_path, tmp_path / "epoch=1.ckpt")]
    assert ranks[0] == ranks[1]
    own = ranks[0][6:]  # up to `on_train_start` the states are not restored yet: set-up, and the sanity check
    assert own and own == seen[-len(own) :]
