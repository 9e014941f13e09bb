"""Predictions are written once, with the indices of their samples, by the ranks that have them.

P=2, D=2    rank 0  samples 0 2 4   6 8 10    writes        rank 1  nothing
            rank 2  samples 1 3 5   7 9       writes        rank 3  nothing
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader

from tests.harness import models
from tests.harness.models import Batch
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, make_strategy, make_trainer

PIPE, DATA, CUBE = Layout(2), Layout(2, data=2), Layout(cube=(1, 1, 2))
BATCH_SIZE = 3


class Writer(BasePredictionWriter):
    """Keeps what it would write, and waits for the other ranks that write."""

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"]) -> None:
        super().__init__(write_interval)
        self.batches: list[tuple[Tensor, list[int], list[int], int, int]] = []
        self.epochs: list[tuple[Any, Any]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert batch_indices is not None
        self.batches.append((prediction, list(batch_indices), batch["i"].tolist(), batch_idx, dataloader_idx))

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Any, batch_indices: Any
    ) -> None:
        trainer.strategy.barrier()
        self.epochs.append((predictions, batch_indices))


class Predicts(models.MLP):
    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch["x"])


def loaders(sizes: Sequence[int]) -> Any:
    made = []
    for size in sizes:
        (batch,) = models.vectors((size,))
        batch["i"] = torch.arange(size)
        samples = [dict(zip(batch, sample, strict=True)) for sample in zip(*batch.values(), strict=True)]
        made.append(DataLoader(samples, batch_size=BATCH_SIZE))  # type: ignore[arg-type]
    return made if len(made) > 1 else made[0]


Written = tuple[list[Any], list[Any], Any]
Samples = dict[tuple[int, int], Tensor]
"""the prediction for each sample, by loader and index"""


def predict(layout: Layout, interval: Any, sizes: Sequence[int], returns: bool) -> Written:
    writer = Writer(interval)
    strategy = {"strategy": make_strategy(layout)} if layout.world_size > 1 else {}
    trainer = make_trainer(layout, callbacks=[writer], use_distributed_sampler=True, **strategy)
    returned = trainer.predict(models.build(Predicts), loaders(sizes), return_predictions=returns)
    return writer.batches, writer.epochs, returned


CASES = covered(
    product(("batch", "epoch", "batch_and_epoch"), ((11,), (11, 4)), (PIPE, DATA, CUBE)),
    by=[("batch_and_epoch", (11, 4), DATA), ("batch_and_epoch", (11,), CUBE)],
)


@pytest.mark.parametrize(("interval", "sizes", "layout"), CASES, ids=str)
def test_each_sample_is_written_once(pool: Pool, interval: str, sizes: tuple[int, ...], layout: Layout) -> None:
    (alone,) = pool.run(1, predict, Layout(), interval, sizes, False)
    ranks = pool.run(layout.world_size, predict, layout, interval, sizes, False)
    writing = [written for rank, written in enumerate(ranks) if layout.topology.coordinates(rank)[1:] == (0, 0, 0, 0)]
    for batches, epochs, returned in ranks:
        assert returned is None
        writes = any(batches is of_writer[0] for of_writer in writing)
        assert bool(batches) == (writes and "batch" in interval)
        assert bool(epochs) == (writes and "epoch" in interval)
    for found, expected in zip(samples_of(writing, len(sizes)), samples_of([alone], len(sizes)), strict=True):
        assert_predictions(found, expected)


def samples_of(written: list[Written], num_loaders: int) -> list[Samples]:
    """The prediction for each sample, by loader and index: as written after batches, and after epochs."""
    after_batches: Samples = {}
    after_epochs: Samples = {}
    for batches, epochs, _ in written:
        for prediction, indices, seen, _, loader in batches:
            assert indices == seen
            put(after_batches, loader, indices, prediction)
        for predictions, all_indices in epochs:
            for loader, indices in enumerate(all_indices):
                own = predictions if num_loaders == 1 else predictions[loader]
                for batch_indices, prediction in zip(indices, own, strict=True):
                    put(after_epochs, loader, batch_indices, prediction)
    return [after_batches, after_epochs]


def put(samples: Samples, loader: int, indices: Sequence[int], prediction: Tensor) -> None:
    for index, row in zip(indices, prediction, strict=True):
        assert (loader, index) not in samples, "written once"
        samples[loader, index] = row


def assert_predictions(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        torch.testing.assert_close(found[key], row, rtol=0, atol=1e-6)


@pytest.mark.thorough
def test_predictions_are_returned_on_the_ranks_that_have_them(pool: Pool) -> None:
    (alone,) = pool.run(1, predict, Layout(), "batch", (11,), True)
    first, second = pool.run(2, predict, PIPE, "batch", (11,), True)
    torch.testing.assert_close(first[2], alone[2], rtol=0, atol=1e-6)
    assert second[2] == [None] * 4
