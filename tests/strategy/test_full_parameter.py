"""`full_parameter` returns whole parameters, and their gradients reach the ranks that hold them.

pipeline    a leaf for each batch, made in on_train_batch_start; the step on rank 0 uses it
cube        a leaf for each batch, made in the step; each rank of the cube uses it on its own samples
"""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from lightning import LightningModule
from torch import Tensor

from tests.habits.parts import Penalised, PenalisedWhole, full
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, make_loader, make_strategy, make_trainer, run


class PenalisedInStep(Penalised):
    def penalised(self) -> Iterator[Tensor]:
        return (full(self, parameter) for parameter in self.parameters())


LAYOUTS = [
    Layout(2, 1, 2),
    Layout(1, 1, 2, cube=(1, 2, 1)),
    Layout(2, 1, 1, cube=(2, 1, 1), outside="replicate"),
]


@pytest.mark.parametrize("layout", covered(LAYOUTS, by=LAYOUTS[:1]), ids=str)
def test_gradients_are_summed_over_microbatches_batches_and_ranks(pool: Pool, layout: Layout) -> None:
    model = PenalisedInStep if layout.pipe == 1 else PenalisedWhole
    batches = partial(models.vectors, (8, 8, 8, 8))
    training = Training(model, batches, torch.float64, steps=2, accumulate=2)
    expected, actual = (run(pool, training, one) for one in (Layout(), layout))
    assert_close(actual.gradients, expected.gradients, 1e-10)
    assert_close(actual.weights, expected.weights, 1e-9)


class Wrong(models.MLP):
    """Asks for a parameter of another pipeline rank in the step."""

    def loss(self, batch: models.Batch) -> Tensor:
        return super().loss(batch) + self.kept().sum()

    def kept(self) -> Tensor:
        return full(self, self.blocks[2].up.weight)


class Old(Wrong):
    """Uses in all batches what it got for the first one."""

    def on_train_batch_start(self, batch: models.Batch, batch_idx: int) -> None:
        whole = full(self, self.blocks[2].up.weight)
        if batch_idx == 0:
            self.whole = whole

    def kept(self) -> Tensor:
        return self.whole


class Foreign(Wrong):
    def on_train_start(self) -> None:
        full(self, torch.zeros(2))


class InRankZerosHook(Wrong):
    """The end of a validation epoch runs on pipeline rank 0 alone."""

    def validation_step(self, batch: models.Batch, batch_idx: int) -> None:
        self(batch["x"])

    def on_validation_epoch_end(self) -> None:
        self.kept()


MESSAGES = {
    Wrong: r"full_parameter was called in a step for blocks.2.up.weight, which is on pipeline rank 1.*batch_start",
    Old: r"the loss uses what full_parameter returned for blocks.2.up.weight in an earlier batch",
    Foreign: r"full_parameter takes a parameter of the LightningModule.* got Tensor",
    InRankZerosHook: r"called in on_validation_epoch_end for blocks.2.up.weight.*in a hook that runs on all",
}


def fit(model: type[LightningModule]) -> None:
    module, loader = models.build(model), make_loader(models.vectors((8, 8)))
    make_trainer(Layout(2, 1, 1), max_steps=2).fit(module, loader, loader if model is InRankZerosHook else None)


@pytest.mark.parametrize("model", MESSAGES)
def test_what_can_not_be_gathered_is_refused(pool: Pool, model: type[LightningModule]) -> None:
    with pytest.raises(RunFailed, match=MESSAGES[model]):
        pool.run(2, fit, model)


def gathered_after_fit() -> set[torch.dtype]:
    """The dtypes of a copy of a module that has kept the last batch's leaves."""
    strategy = make_strategy(Layout(2, 1, 1), master_weights="fp32")
    trainer = make_trainer(Layout(2, 1, 1), strategy=strategy, precision="bf16-true", max_steps=2)
    batches = [batch | {"x": batch["x"].bfloat16()} for batch in models.vectors((8, 8))]
    trainer.fit(models.build(PenalisedWhole), make_loader(batches))
    whole = strategy.gather_model()
    return set() if whole is None else {parameter.dtype for parameter in whole.parameters()}


@pytest.mark.thorough
def test_a_module_that_keeps_whole_parameters_can_be_copied_with_master_weights(pool: Pool) -> None:
    assert pool.run(2, gathered_after_fit) == [{torch.bfloat16}, set()]
