"""Experts that a cube's ranks share train as those of one process do, on uneven shares, and where experts get no token.

experts 0 .. 4 of each block on the cube (1, 2, 2):   0 1 | 2 3 | 4 | -      tokens go to their experts and back
"""

from functools import partial
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from lightning_hanayo.errors import HanayoError
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.oracle import plain
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, run

NUM_EXPERTS, CHOSEN = 5, 2


class Routed(nn.Module):
    """Each token goes through two of the experts of a Mixtral. The last expert is chosen for none of them."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = MixtralConfig(hidden_size=models.WIDTH, intermediate_size=24, num_local_experts=NUM_EXPERTS)
        config._experts_implementation = "eager"  # in fp64, too
        self.norm = nn.LayerNorm(models.WIDTH)
        self.mix = nn.Linear(models.WIDTH, models.WIDTH)
        self.router = nn.Linear(models.WIDTH, NUM_EXPERTS)
        self.experts = MixtralExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x + self.mix(self.norm(x))).flatten(0, -2)
        logits = self.router(tokens)
        weights, chosen = logits[:, :-1].softmax(-1).topk(CHOSEN)
        return x + self.experts(tokens, chosen, weights).view_as(x)


class Mixture(models.MLP):
    """Sequences of six tokens, whose mean is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(4))

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]).mean(1), batch["y"])


class Skewed(Mixture):
    """All tokens choose the first two experts: three of four ranks get none."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.router.bias.data[:2] = 100.0  # type: ignore[union-attr]


def sequences(sizes: tuple[int, ...] = (8, 8, 6)) -> list[Batch]:
    random = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(size, 6, models.WIDTH, generator=random),
            "y": torch.randint(models.CLASSES, (size,), generator=random),
        }
        for size in sizes
    ]


CUBES = [(1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 3)]
LAYOUTS = [
    *(Layout(1, 1, 1, cube=cube, num_microbatches=2, experts="cube") for cube in CUBES),
    Layout(2, 1, 1, cube=(1, 2, 1), experts="cube"),
    Layout(2, 1, 1, cube=(1, 2, 1), experts="cube", schedule="hanayo-zb"),
    Layout(1, 1, 1, cube=(1, 2, 2), num_microbatches=2, experts="cube", recompute="blocks"),
    Layout(2, 1, 1, cube=(1, 1, 2), experts="cube", recompute="blocks"),
    Layout(1, 1, 2, cube=(1, 2, 1), num_microbatches=2, experts="cube"),
    Layout(1, 1, 1, cube=(1, 2, 1), num_microbatches=2, experts="cube", outside="replicate"),
    Layout(1, 1, 1, cube=(2, 1, 2), num_microbatches=2, experts="cube", weights="batch"),
]


@pytest.mark.parametrize(
    ("model", "layout"),
    covered([(model, layout) for model in (Mixture, Skewed) for layout in LAYOUTS], by=[(Mixture, LAYOUTS[3])]),
    ids=str,
)
def test_it_trains_as_in_one_process(pool: Pool, model: type[LightningModule], layout: Layout) -> None:
    training = Training(model, sequences, torch.float64, steps=3, clip=0.5)
    actual, expected = run(pool, training, layout), plain(pool, training)
    assert_close(actual.gradients, expected.gradients, 1e-10)
    assert_close(actual.weights, expected.weights, 1e-9)
