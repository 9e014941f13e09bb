"""Models of transformers with code between their blocks train as in one process, unmodified."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import models
from tests.harness.models import Batch, build
from tests.harness.pool import Pool
from tests.harness.training import (
    Layout,
    Outcome,
    OutcomeCallback,
    Training,
    assert_close,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
    merge,
)

DOUBLE = torch.float64
SMALL: dict[str, Any] = {"vocab_size": 37, "pad_token_id": 1}


class Features(models.Trained):
    """A model without a head: the mean of a linear function of its features."""

    def __init__(self, model: nn.Module, width: int, key: str) -> None:
        super().__init__()
        self.model, self.head, self.key = model, nn.LazyLinear(1) if not width else nn.Linear(width, 1), key

    def loss(self, batch: Batch) -> Tensor:
        features = self.model(**{self.key: batch["x"]}).last_hidden_state
        if features.dim() == 4:
            features = features.flatten(2).transpose(1, 2)
        scores = self.head(features).squeeze(-1).mean(1)
        return (scores - batch["y"]).square().mean()


def tokens() -> list[Batch]:
    """Three batches of token ids, with padding at some ends."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        ids = torch.randint(2, 37, (8, 12), generator=generator)
        found.append({"x": ids, "y": torch.rand(8, generator=generator)})
    return found


def images() -> list[Batch]:
    """Three batches of images."""
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, 3, 32, 32, generator=generator), "y": torch.rand(8, generator=generator)}] * 3


def xlm(kind: str = "XLM") -> nn.Module:
    import transformers

    sizes = {"emb_dim": 16, "n_layers": 4, "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0, "pad_index": 1}
    config = getattr(transformers, f"{kind}Config")(**SMALL, **sizes, max_position_embeddings=32)
    return Features(getattr(transformers, f"{kind}Model")(config), 16, "input_ids")


def funnel() -> nn.Module:
    from transformers import FunnelConfig, FunnelModel

    none = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    config = FunnelConfig(
        **SMALL, block_sizes=[2, 2], num_decoder_layers=1, d_model=16, n_head=2, d_head=8, d_inner=32, **none
    )
    return Features(FunnelModel(config), 16, "input_ids")


def poolformer() -> nn.Module:
    from transformers import PoolFormerConfig, PoolFormerModel

    config = PoolFormerConfig(hidden_sizes=[8, 12, 16, 16], depths=[2, 2, 2, 2], mlp_ratio=2.0, drop_path_rate=0.0)
    return Features(PoolFormerModel(config), 16, "pixel_values")


def pvt() -> nn.Module:
    from transformers import PvtConfig, PvtModel

    config = PvtConfig(
        image_size=32, hidden_sizes=[8, 8, 16, 16], depths=[1, 2, 2, 1], num_attention_heads=[1, 1, 2, 2],
        mlp_ratios=[2, 2, 2, 2], drop_path_rate=0.0, patch_sizes=[4, 2, 2, 2], strides=[4, 2, 2, 2],
        sequence_reduction_ratios=[4, 2, 1, 1],
    )  # fmt: skip
    return Features(PvtModel(config), 16, "pixel_values")


@dataclass(frozen=True)
class Case:
    """A model, its batches, and the lists that are named."""

    model: Callable[[], Any]
    batches: Callable[[], list[Batch]]
    blocks: str | tuple[str, ...] | None = None


_XLM = ("model.attentions", "model.layer_norm1", "model.ffns", "model.layer_norm2")
CASES = {
    "xlm": Case(xlm, tokens, _XLM),
    "xlm, feed-forward alone": Case(xlm, tokens, "model.ffns"),
    "flaubert": Case(partial(xlm, "Flaubert"), tokens, _XLM),
    "funnel": Case(funnel, tokens),
    "poolformer": Case(poolformer, images),
    "poolformer, in turn": Case(poolformer, images, ("model.encoder.patch_embeddings", "model.encoder.block")),
    "pvt": Case(pvt, images),
    "pvt, in turn": Case(pvt, images, ("model.encoder.patch_embeddings", "model.encoder.block")),
}
LAYOUTS = [
    Layout(2, 1, 1), Layout(2, 1, 1, step="batch"), Layout(2, 1, 1, step="auto"), Layout(1, 1, 1, cube=(1, 2, 1)),
    Layout(4, 1, 1, "1f1b"),
]  # fmt: skip


def fit(case: str, layout: Layout) -> Outcome:
    """Train on one rank."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")
    warnings.filterwarnings("ignore", message=".*blocks return or store")
    one, callback = CASES[case], OutcomeCallback()
    training = Training(one.model, one.batches, DOUBLE)
    is_plain = layout.world_size == 1
    strategy = "auto" if is_plain else make_strategy(layout, blocks=one.blocks)
    trainer = make_trainer(layout, max_steps=3, callbacks=[callback], strategy=strategy)
    module = build(one.model, DOUBLE)
    trainer.fit(module, make_loader(training.share(data_rank(layout), layout.data)))
    return callback.outcome


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.thorough
def test_matches_one_process(pool: Pool, case: str, layout: Layout) -> None:
    (expected,) = pool.run(1, fit, case, Layout())
    outcome = merge(pool.run(layout.world_size, fit, case, layout), layout)
    assert_close(outcome.weights, expected.weights, 1e-10)
