"""Code between two blocks is what it is in one process: functions of torch, modules, values kept past blocks.

x = x + block(norm(x))      a residual stream outside the blocks, and a norm whose weights are rank 0's
"""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

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
