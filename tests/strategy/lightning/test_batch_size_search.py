"""Searches for a batch size find on several ranks what they find in one process, until a rank is out of memory."""

import re
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from tests.harness import models
from tests.harness.models import Batch
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, assert_bit_equal, assert_close, make_strategy, make_trainer, own_weights

ONE, CUT, PIPE, CUBE = Layout(num_microbatches=1), Layout(num_microbatches=2), Layout(2), Layout(2, cube=(1, 1, 2))
FOUND = "rank 1 is out of memory with batch_size=16. .* 8 has fitted"


class LimitedBlock(models.Block):
    """Says what a GPU without memory says, for more than so many samples."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if self.most is not None and len(x) > self.most:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(x)


class Sized(models.MLP):
    """Has a batch size that can be searched. With `most`, block 3, on pipeline rank 1 of two, takes no more samples."""

    def __init__(self, most: int | None = None, batch_size: int = 2) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(LimitedBlock(most if i == 3 else None) for i in range(models.NUM_BLOCKS))
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        (batch,) = models.vectors((48,))
        samples = [dict(zip(batch, sample, strict=True)) for sample in zip(*batch.values(), strict=True)]
        return DataLoader(samples, batch_size=self.batch_size)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch["x"])


def search(
    layout: Layout, method: str, folder: Path, *, mode: str = "power", most: int | None = None, by_tuner: bool = False
) -> tuple[Any, ...]:
    """The batch size, metrics, number of steps and weights after a search and the run that follows it; or the error."""
    warnings.filterwarnings("ignore", message=".*`weights_only` was not set|.*no `(train|val)_dataloader`")
    options = {"default_root_dir": folder, "max_epochs": 1, "callbacks": [] if by_tuner else [finder(mode)]}
    trainer = make_trainer(layout, strategy=make_strategy(layout), **options)
    module = models.build(lambda: Sized(most))
    try:
        if by_tuner:
            Tuner(trainer).scale_batch_size(module, method=method, mode=mode, max_trials=4)  # type: ignore[arg-type]
        predicted = getattr(trainer, method)(module)
    except Exception as error:
        return (f"{type(error).__name__}: {error}",)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.batch_size, trainer.global_step, metrics, own_weights(module, trainer), predicted


def finder(mode: str) -> BatchSizeFinder:
    return BatchSizeFinder(mode, max_trials=4)


SEARCHES = covered(
    [
        *product(("fit", "validate", "test", "predict"), ("power", "binsearch"), (False, True), (PIPE,)),
        ("fit", "power", False, CUBE),
    ],
    by=[("fit", "power", False, PIPE)],
)


@pytest.mark.parametrize(("method", "mode", "by_tuner", "layout"), SEARCHES, ids=str)
def test_the_size_and_the_run_after_it_are_those_of_one_process(
    pool: Pool, tmp_path: Path, method: str, mode: str, by_tuner: bool, layout: Layout
) -> None:
    ranks = []
    for run in (ONE, layout):
        ranks += pool.run(run.world_size, search_as, run, method, tmp_path / str(run), mode, by_tuner)
    alone, first, *others = ranks
    for size, steps, metrics, *_ in (first, *others):
        assert size == alone[0] > 2 and steps == alone[1]
        assert metrics == pytest.approx(alone[2], abs=1e-5)
    merged = {name: value for rank in (first, *others) for name, value in rank[3].items()}
    assert_close(merged, alone[3], 1e-5)
    if method == "predict":
        torch.testing.assert_close(first[4], alone[4], rtol=0, atol=1e-5)
    assert not list(tmp_path.rglob(".scale_batch_size*")), "the state before the search is not kept"


def search_as(layout: Layout, method: str, folder: Path, mode: str, by_tuner: bool) -> tuple[Any, ...]:
    return search(layout, method, folder, mode=mode, by_tuner=by_tuner)


def search_limited(layout: Layout, method: str, folder: Path, most: int) -> tuple[Any, ...]:
    return search(layout, method, folder, most=most)


@pytest.mark.parametrize("method", covered(("fit", "predict"), by=["fit"]))
def test_a_rank_without_memory_ends_the_search_with_the_size_that_has_fitted(
    pool: Pool, tmp_path: Path, method: str
) -> None:
    (waiting,), (failed,) = pool.run(2, search_limited, PIPE, method, tmp_path, 2)
    assert re.match(f"UnsupportedError: {FOUND}", failed)
    assert re.match(f"PeerFailed: rank 1 .*{FOUND}", waiting)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [ONE, CUT], ids=["whole", "cut"])
def test_one_process_goes_on_after_it_was_out_of_memory(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    most = 8 // layout.num_microbatches
    (found,) = pool.run(1, search_limited, layout, "fit", tmp_path, most)
    (given,) = pool.run(1, fit_with, layout, 8)
    assert found[0] == 8
    assert_bit_equal(found[3], given)


def fit_with(layout: Layout, batch_size: int) -> dict[str, Tensor]:
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")
    trainer = make_trainer(layout, strategy=make_strategy(layout), max_epochs=1)
    module = models.build(lambda: Sized(batch_size=batch_size))
    trainer.fit(module)
    return own_weights(module, trainer)
