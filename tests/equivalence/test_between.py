"""Code between two blocks is what it is in one process: functions of torch, modules, values kept past blocks.

x = x + block(norm(x))      a residual stream outside the blocks, and a norm whose weights are rank 0's
"""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.harness import models
from tests.harness.models import WIDTH
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, run

DOUBLE = torch.float64


class Residual(models.MLP):
    """The residual stream, norms and a table are outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.blocks)
        self.table = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x)) * self.table
        return self.head(x)


class Shapes(models.MLP):
    """Views, changes in place, masks of the batch, tuples, and the output of an early block at the end."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.sum(-1) > 0
        x, found = self.embedding(x), []
        for block in self.blocks:
            x = block(x)
            num_samples, width = x.shape
            x = x.view(num_samples, 2, width // 2).flip(1).reshape(num_samples, -1)
            x[chosen] = x[chosen] * 2
            low, high = x.chunk(2, dim=-1)
            x = torch.cat([high, low.clone()], -1)
            x += 0.1 * torch.ones(width, dtype=x.dtype, device=x.device)
            found.append(x)
        return self.head(x + found[2] + torch.stack(found).mean(0))


class Dropped(models.MLP):
    """Dropout between the blocks, as a function and as a module, before and after a block's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + self.dropout(block(functional.dropout(self.norm(x), 0.2)))
        return self.head(x)


class Autocast(models.MLP):
    """A product between the blocks in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.between(x)
            assert y.dtype == torch.bfloat16
            x = block(x) + y.type(x.dtype)
        return self.head(x)


MODELS = [Residual, Shapes]
LAYOUTS = [
    Layout(2, 1, 1), Layout(2, 2, 1, "hanayo-zb"), Layout(4, 1, 1), Layout(2, 1, 1, "1f1b"), Layout(2, 1, 2),
    Layout(2, 1, 1, step="batch"), Layout(2, 2, 1, step="batch"), Layout(2, 1, 1, step="auto"),
    Layout(1, 1, 1, cube=(1, 2, 1)), Layout(2, 1, 1, cube=(1, 2, 1)), Layout(1, 1, 1, cube=(1, 2, 1), step="batch"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout"), covered(product(MODELS, LAYOUTS), by=[(Residual, LAYOUTS[1])]), ids=str)
def test_matches_one_process(pool: Pool, model: type[models.MLP], layout: Layout) -> None:
    training = Training(model, partial(models.vectors, (8, 8, 6)), DOUBLE, clip=0.1)
    assert_close(run(pool, training, layout).weights, plain(pool, training).weights, 1e-10)


def test_masks_between_blocks_depend_on_no_schedule_and_no_recomputation(pool: Pool) -> None:
    """Of one cut: in the gaps of stage 0 they come from the step's own numbers."""
    training = Training(Dropped, partial(models.vectors, (8, 6)), DOUBLE, steps=2)
    layouts = [Layout(2, 1, 1), Layout(2, 1, 1, "zbv"), Layout(2, 1, 1, recompute="blocks")]
    first, *others = [run(pool, training, layout).weights for layout in layouts]
    for weights in others:
        assert_close(weights, first, 1e-12)
    assert max((plain(pool, training).weights[name] - one).abs().max() for name, one in first.items()) > 1e-4


def test_autocast_between_blocks(pool: Pool) -> None:
    """Only its weights' gradients, which are products over samples in bf16, depend on micro-batches."""
    training = Training(Autocast, partial(models.vectors, (8, 8)), torch.float32, steps=2)
    made, expected = (one.gradients for one in (run(pool, training, Layout(2, 1, 1)), plain(pool, training)))
    assert_close(made, expected, 2e-2)
    own, alone = ({name: one for name, one in of.items() if "between" not in name} for of in (made, expected))
    assert_close(own, alone, 1e-5)
