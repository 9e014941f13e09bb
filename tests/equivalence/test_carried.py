"""What blocks and step store for each other arrives under every schedule, on all data ranks, and recomputed."""

import warnings
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.habits.layers import Keeps
from tests.habits.side_outputs import AuxiliaryLoss, CollectsInBox
from tests.habits.step_state import Conditioned
from tests.harness import models
from tests.harness.models import WIDTH, Batch
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, make_loader, make_trainer, run

VECTORS = partial(models.vectors, (16, 16, 12))
LAYOUTS = [
    Layout(4, 1, 1), Layout(2, 1, 2), Layout(2, 1, 1, "1f1b"), Layout(2, 2, 1, "hanayo-zb"), Layout(2, 1, 1, "zbv"),
    Layout(2, 2, 1, "interleaved-zb"), Layout(2, 1, 1, "gpipe"),
]  # fmt: skip


class Recomputed(AuxiliaryLoss):
    """Each block is recomputed in its backward, which stores the loss once more."""

    class Block(AuxiliaryLoss.Block):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(super().forward, x, use_reentrant=False)
            return x


class Both(Conditioned):
    """The step conditions the blocks, and the blocks append to a list in the same box."""

    class Block(Conditioned.Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.box.losses.append(x.square().mean())
            return x

    def loss(self, batch: Batch) -> Tensor:
        warnings.filterwarnings("ignore", message="self.box.losses: set by the step")  # which no hook reads
        self.box.losses = []
        return super().loss(batch) + 0.1 * sum(self.box.losses)


MODELS = [AuxiliaryLoss, CollectsInBox, Recomputed, Both]


@pytest.mark.parametrize(
    ("model", "layout"),
    covered(
        product(MODELS, LAYOUTS),
        by=[
            (AuxiliaryLoss, LAYOUTS[2]), (Both, LAYOUTS[3]), (Recomputed, LAYOUTS[4]),
        ],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_equals_one_process(pool: Pool, model: Any, layout: Layout) -> None:
    training = Training(model, VECTORS, torch.float64, steps=3, accumulate=1 + (layout.pipe == 2))
    assert_close(run(pool, training, layout).weights, plain(pool, training).weights, 1e-10)


class KeepsParameters(Keeps):
    """Lists, dictionaries and a recurrent layer hold parameters of blocks."""

    class Block(Keeps.Block):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x) + self.rnn(x[:, None])[0][:, 0] / (1 + self.up.weight.type(x.dtype).norm())
            return out


@pytest.mark.parametrize(
    "layout", covered([Layout(2, 1, 1), Layout(1, 1, 1, cube=(1, 2, 1))], by=[Layout(2, 1, 1)]), ids=str
)
def test_parameters_that_blocks_keep_elsewhere_train_as_in_one_process(pool: Pool, layout: Layout) -> None:
    training = Training(KeepsParameters, VECTORS, torch.float64, steps=3)
    assert_close(run(pool, training, layout).weights, plain(pool, training).weights, 1e-10)


class Validated(AuxiliaryLoss):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val", self.loss(batch), batch_size=len(batch["x"]))


def validate(layout: Layout) -> float:
    module = models.build(Validated, torch.float64)
    trainer = make_trainer(layout)
    (result,) = trainer.validate(module, make_loader(models.vectors((8, 6), torch.float64)), verbose=False)
    return result["val"]


def test_evaluation_reads_what_blocks_store(pool: Pool) -> None:
    (expected,) = pool.run(1, validate, Layout())
    assert pool.run(2, validate, Layout(2, 2, 1))[0] == pytest.approx(expected, rel=1e-12)
