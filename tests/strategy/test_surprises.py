"""What works in one process and can't, or not so, in a pipeline: it works, or is refused by name; it never hangs."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    LambdaCallback,
    StochasticWeightAveraging,
)
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.harness import models
from tests.harness.models import Batch
from tests.harness.pool import Pool, RunFailed
from tests.harness.running import Layout, make_loader, make_trainer

WAVE = Layout(2, 1, 1)


def batches() -> list[Batch]:
    return models.vectors((8, 8, 8))


class Stops(models.MLP):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.trainer.should_stop = batch_idx == 1
        return super().training_step(batch, batch_idx)


class Unpacks(models.MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        _, _ = batch

    def loss(self, batch: Any) -> Tensor:
        return super().loss({"x": batch[0], "y": batch[1]})


class Backbone(models.MLP):
    @property
    def backbone(self) -> Any:
        return self.blocks


class Lies(IterableDataset[Batch]):
    """Says it has more batches than it has."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Batch]:
        yield from batches()


def fit(model: Callable[[], Any] = models.MLP, loader: Any = None, **options: Any) -> Trainer:
    trainer = make_trainer(WAVE, **{"max_epochs": 2, **options})
    trainer.fit(models.build(model), loader if loader is not None else make_loader(batches()))
    return trainer


def stops() -> None:
    fit(Stops)


def unpacks() -> None:
    fit(Unpacks, make_loader([tuple(batch.values()) for batch in batches()]))


def averages() -> None:
    fit(callbacks=[EMAWeightAveraging()])


def averages_late() -> None:
    fit(callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)])


def finetunes() -> None:
    fit(Backbone, callbacks=[BackboneFinetuning(1)])


REFUSED = {
    "should_stop in a step": (stops, "should_stop"),
    "a batch unpacked where there is none": (unpacks, "above 0, which gets no data"),
    "weight averaging": (averages, "EMAWeightAveraging"),
    "stochastic weight averaging": (averages_late, "StochasticWeightAveraging"),
    "finetuning": (finetunes, "BackboneFinetuning"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(pool: Pool, case: str) -> None:
    function, named = REFUSED[case]
    with pytest.raises(RunFailed) as caught:
        pool.run(2, function, timeout=20.0)
    assert "UnsupportedError" in caught.value.first.bases and named in caught.value.first.message, str(caught.value)


def lies() -> int:
    warnings.filterwarnings("ignore", message=".*has `__len__` defined")
    return fit(loader=DataLoader(Lies(), batch_size=None)).global_step


def test_a_stream_that_is_shorter_than_it_says(pool: Pool) -> None:
    assert pool.run(2, lies) == [6, 6]


def reads_by_lambda() -> list[float]:
    read: list[float] = []
    reads = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: read.append(float(trainer.callback_metrics["train_loss"]))
    )
    fit(callbacks=[reads], max_epochs=1)
    return read


def test_a_lambda_callback_reads_metrics_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(2, reads_by_lambda)
    assert first == second and len(set(first)) == 3


def keeps_example() -> list[int]:
    module = models.build(models.MLP)
    module.example_input_array = (torch.zeros(2, models.WIDTH),)
    trainer = make_trainer(WAVE, max_steps=1, enable_model_summary=True)
    trainer.fit(module, make_loader(batches()))
    return list(module.example_input_array[0].shape)


def test_the_users_example_comes_back(pool: Pool) -> None:
    assert pool.run(2, keeps_example) == [[2, models.WIDTH]] * 2
