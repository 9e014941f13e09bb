"""Several passes through the stack on data ranks, with padded samples in a cube, and outside `fit`."""

import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.habits.passes import After, ChosenAndRejected, FrozenFeatures
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.oracle import plain
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Outcome,
    Training,
    assert_close,
    fit,
    make_loader,
    make_strategy,
    make_trainer,
    merge,
)

DATA = Layout(2, 1, 2)


def quietly(training: Training, layout: Layout) -> Outcome:
    warnings.filterwarnings("ignore", message="the step makes")
    return fit(training, layout)


@pytest.mark.parametrize("model", covered([After, ChosenAndRejected, FrozenFeatures], by=[ChosenAndRejected]))
def test_data_ranks_sum_the_gradients_of_all_passes(pool: Pool, model: Any) -> None:
    training = Training(model, partial(models.vectors, (8, 6)), dtype=torch.float64, steps=3)
    outcome = merge(pool.run(DATA.world_size, quietly, training, DATA), DATA)
    expected = plain(pool, training)
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-12)
    assert_close(outcome.gradients, expected.gradients, 1e-13)
    assert_close(outcome.weights, expected.weights, 1e-9)


class Predicts(models.MLP):
    """Three forwards, of which each needs the one before."""

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = batch["x"]
        for _ in range(3):
            x = x + self(x).mean(1, keepdim=True)
        return x


def predictions(layout: Layout) -> list[Any]:
    strategy = make_strategy(layout) if layout.world_size > 1 else "auto"
    trainer = make_trainer(layout) if strategy == "auto" else make_trainer(layout, strategy=strategy)
    module = models.build(Predicts, torch.float64)
    found: Any = trainer.predict(module, make_loader(models.vectors((8, 5), torch.float64)))
    return found if trainer.strategy.global_rank == 0 else []


@pytest.mark.parametrize("layout", [Layout(2, 2, 1), Layout(1, 1, 1, cube=(1, 2, 1))], ids=str)
def test_predict_with_several_forwards(pool: Pool, layout: Layout) -> None:
    (expected,) = pool.run(1, predictions, Layout())
    for made, wanted in zip(pool.run(2, predictions, layout)[0], expected, strict=True):
        torch.testing.assert_close(made, wanted, rtol=0, atol=1e-12)


class Padded(models.HuggingFace):
    """Of a batch whose last samples are padded, so that only some ranks of a cube have a mask."""

    def __init__(self) -> None:
        super().__init__(models.bert().model)

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = self.model(**batch).logits
        output = self.model(**batch)
        return output.loss + (output.logits - target).square().mean()


def test_blocks_arguments_that_differ_between_ranks_in_a_second_pass_are_refused(pool: Pool) -> None:
    training = Training(Padded, partial(models.padded, (6,)), steps=1)
    with pytest.raises(RunFailed) as caught:
        pool.run(2, fit, training, Layout(1, 1, 1, cube=(1, 2, 1)), timeout=30.0)
    assert re.search("pass number 2 .*structure or shape between a cube's ranks", caught.value.first.message)
    assert [failure for failure in caught.value.failures if failure.kind == "timed out"] == []
