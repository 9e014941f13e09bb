"""Parameters that hooks make during a run train as in one process, or are refused by name.

setup    on_fit_start    on_train_epoch_start, on_train_batch_start, ...
cut      cut again: new parameters get rank 0's values, and the pipeline is built anew
"""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, run


class Sum(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


class Late(models.MLP):
    """Adds parameters to the optimizer that a hook has made."""

    def add(self, module: nn.Module) -> nn.Module:
        made = module.double()
        self.trainer.optimizers[0].add_param_group({"params": list(made.parameters())})
        return made


class Adapters(Late):
    """A layer in each block, and another head, before training begins."""

    def on_fit_start(self) -> None:
        for block in self.blocks:
            block.up = Sum(block.up, self.add(nn.Linear(models.WIDTH, 2 * models.WIDTH, bias=False)))
        self.head = self.add(nn.Linear(models.WIDTH, models.CLASSES))


class Deeper(Late):
    """One more block, from the second batch on."""

    def on_train_batch_start(self, batch: models.Batch, batch_idx: int) -> None:
        if batch_idx == 1:
            self.blocks.append(self.add(models.Block()))


class Said(Deeper):
    """The step logs another value from the second batch on, so that the third one is probed."""

    def loss(self, batch: models.Batch) -> Tensor:
        if len(self.blocks) > models.NUM_BLOCKS:
            self.log("deeper", 1.0)
        return super().loss(batch)


class Configured(models.MLP):
    """A parameter made where the optimizer is."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.scale = nn.Parameter(torch.ones(models.CLASSES, dtype=torch.float64))
        return super().configure_optimizers()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class BlockReplaced(Late):
    def on_train_batch_start(self, batch: models.Batch, batch_idx: int) -> None:
        if batch_idx == 1:
            self.blocks[2] = self.add(models.Block())


class Unregistered(models.MLP):
    """The optimizer has a parameter that isn't the module's."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones((), dtype=torch.float64))]})
        return optimizer


LAYOUTS = (Layout(2, 1, 1), Layout(1, 1, 1, cube=(1, 2, 1)))
AUTO = Layout(2, 1, 1, step="auto")
CASES = [(Adapters, LAYOUTS[0]), (Said, AUTO), (Adapters, LAYOUTS[1]), (Deeper, LAYOUTS[0]), (Configured, LAYOUTS[1])]


@pytest.mark.parametrize(
    ("model", "layout"),
    covered(CASES, by=[(Adapters, LAYOUTS[0]), (Said, AUTO)]),
)
def test_they_train_as_in_one_process(pool: Pool, model: type[models.MLP], layout: Layout) -> None:
    training = Training(model, partial(models.vectors, (8, 8, 8)), torch.float64, steps=3)
    expected, actual = (run(pool, training, one) for one in (Layout(), layout))
    assert_close(actual.weights, expected.weights, 1e-9)


@pytest.mark.parametrize(
    ("model", "message"), [(BlockReplaced, "was blocks.2 when training began"), (Unregistered, "isn't one of the Lig")]
)
def test_what_cannot_train_is_named(pool: Pool, model: type[models.MLP], message: str) -> None:
    with pytest.raises(RunFailed) as failed:
        run(pool, Training(model, partial(models.vectors, (8, 8, 8)), torch.float64, steps=3), LAYOUTS[0])
    assert message in failed.value.first.message
