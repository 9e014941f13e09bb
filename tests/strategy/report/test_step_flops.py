"""FLOPs of a step are those of a count by hand, or given; where they aren't known, a line says what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lightning_hanayo.strategy.lightning.state import step_flops

LAYERS, WIDTH, HIDDEN, HEADS, TOKENS, WORDS = 3, 8, 20, 2, 5, 11


class Transformer(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layers = (nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True) for _ in range(LAYERS))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, WORDS)
        self.example_input_array = torch.zeros(2, TOKENS, dtype=torch.long)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ReadsValues(Transformer):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids[ids > 0])


def of(module: LightningModule, given: float | None = None) -> tuple[Callable[[Any], float], str]:
    return step_flops(module, given, len)


def test_a_transformer_has_the_flops_of_a_count_by_hand() -> None:
    projections, scores_and_values = 4 * WIDTH**2, 2 * TOKENS * WIDTH
    products = LAYERS * (projections + scores_and_values + 2 * WIDTH * HIDDEN) + WIDTH * WORDS
    module = Transformer()
    of_batch, said = of(module)
    assert of_batch(torch.zeros(7, TOKENS)) == 7 * TOKENS * 3 * 2 * products
    assert "3 times a forward of example_input_array" in said
    assert all(part.training for part in module.modules())


@pytest.mark.parametrize("module", [ReadsValues, LightningModule])
def test_what_is_not_known(module: Any) -> None:
    of_batch, said = of(module())
    assert of_batch(torch.zeros(7, TOKENS)) == 0.0
    assert "set example_input_array" in said


def test_what_the_user_gives_counts_first() -> None:
    module = Transformer()
    module.flops_per_batch = 5e9  # type: ignore[assignment]
    assert of(module)[0](None) == 5e9
    assert of(module, 3e9)[0](None) == 3e9
