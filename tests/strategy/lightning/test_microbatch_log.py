"""What micro-batches log becomes what the whole batch would have logged.

shares 3/4, 1/4      means: weighted      sums: added      the same key twice: first with first, second with second
"""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchSource
from lightning_hanayo.strategy.batch_split import BatchSplitter
from lightning_hanayo.strategy.lightning.metrics import GivenBatchSizes, MicrobatchLog
from lightning_hanayo.strategy.losses import PieceWeights

SPLIT = BatchSplitter().split(torch.zeros(4, 1), 2, BatchSource())


def new_log(results: _ResultCollection, shares: tuple[float, ...] = (0.5, 0.5)) -> MicrobatchLog:
    trainer: Any = SimpleNamespace(_results=results)
    return MicrobatchLog(trainer, SPLIT, PieceWeights(shares, shares, shares), BatchSplitter(), GivenBatchSizes())


def logged(values: list[list[float]], shares: tuple[float, ...] = (0.75, 0.25), **options: Any) -> _ResultCollection:
    """Micro-batch m logs values[m], one after the other, all under one name."""
    results = _ResultCollection(training=True)
    log = new_log(results, shares)
    with log.collecting():
        for m, several in enumerate(values):
            log.enter(m)
            for value in several:
                results.log("training_step", "v", torch.tensor(value), on_step=True, on_epoch=True, **options)
    return results


def step_and_epoch(results: _ResultCollection) -> tuple[float, float]:
    return tuple(float(results.metrics(on_step)["callback"]["v"]) for on_step in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2.0, 2.0)),
        ({"reduce_fx": "mean"}, (2.0, 2.0)),
        ({"reduce_fx": torch.sum}, (6.0, 6.0)),
        ({"reduce_fx": torch.max}, (5.0, 5.0)),
        ({"reduce_fx": torch.min}, (1.0, 1.0)),
    ],
)
def test_one_value_each(options: dict[str, Any], expected: tuple[float, float]) -> None:
    assert step_and_epoch(logged([[1.0], [5.0]], **options)) == expected


def test_the_same_key_twice_in_a_step() -> None:
    step, epoch = step_and_epoch(logged([[0.0, 1.0], [0.0, 1.0]]))
    assert (step, epoch) == (1.0, 0.5), "the last one, and the mean of both, as in one process"


def test_the_batch_size_is_what_lightning_reads_from_the_whole_batch() -> None:
    """As in one process: micro-batches of a list may give another size than the batch does."""
    results = _ResultCollection(training=True)
    for length, value in ((2, 1.0), (6, 5.0)):
        results.batch = [{"x": torch.ones(length)}] * 4
        log = new_log(results)
        with log.collecting():
            for m in range(2):
                log.enter(m)
                results.log("training_step", "read", torch.tensor(value), on_epoch=True)
                results.log("training_step", "given", torch.tensor(value), on_epoch=True, batch_size=3)
    means = [float(results.metrics(False)["callback"][name]) for name in ("read", "given")]
    assert means == [(2 * 1.0 + 6 * 5.0) / 8, 3.0]


def test_without_a_share_not_even_a_nan_counts() -> None:
    assert step_and_epoch(logged([[2.0], [float("nan")]], shares=(1.0, 0.0))) == (2.0, 2.0)


def test_a_value_of_placeholders_is_refused() -> None:
    results = _ResultCollection(training=True)
    log = new_log(results)
    with pytest.raises(UnsupportedError, match=r"self.log\('v'\)"), log.collecting():
        log.enter(0)
        results.log("training_step", "v", torch.zeros((), device="meta"))
    assert not results and "update_metrics" not in vars(results)


class LogsWithSizes(LightningModule):
    """Logs the mean of its batch with a batch size."""

    def __init__(self, size: Callable[[Tensor], int | None]) -> None:
        super().__init__()
        self.layer, self.size = nn.Linear(1, 1), size

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("mean", batch.mean(), batch_size=self.size(batch), on_step=False, on_epoch=True)
        return self.layer(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_mean", batch.mean(), batch_size=self.size(batch))
        self.log("val_last", batch.mean(), on_step=True, on_epoch=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


SIZES: dict[str, Callable[[Tensor], int | None]] = {
    "none": lambda x: None,
    "len": len,
    "elements": lambda x: 3 * x.numel(),
    "constant": lambda x: 4,
    "one": lambda x: 1,
}


def epoch_means(size: str, num_samples: int, strategy: Any, batch_size: int = 4) -> dict[str, float]:
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    samples = torch.arange(float(num_samples)).view(-1, 1)
    trainer.fit(LogsWithSizes(SIZES[size]), *[DataLoader(samples, batch_size)] * 2)  # type: ignore[arg-type]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("num_samples", [9, 7, 1], ids="last batch of {}".format)
@pytest.mark.parametrize("size", SIZES)
def test_means_over_an_epoch_are_those_of_one_process(size: str, num_samples: int) -> None:
    """4 samples in 2 micro-batches, and 1 or 3 in the last batch; a constant batch_size weighs batches alike."""
    own, alone = (epoch_means(size, num_samples, one) for one in (HanayoStrategy(1, num_microbatches=2), "auto"))
    assert own == pytest.approx(alone)


def test_what_may_be_a_constant_is_named() -> None:
    """All micro-batches have one sample: nothing tells a constant from 4 tokens in each sample."""
    with pytest.warns(
        UserWarning, match=r"self.log\('mean', batch_size=4\) gives one number for 3 .* leave batch_size out"
    ):
        epoch_means("constant", 7, HanayoStrategy(1, num_microbatches=4))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "self.log")
        epoch_means("len", 7, HanayoStrategy(1, num_microbatches=4))
