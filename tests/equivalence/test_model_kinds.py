"""Models of transformers, unmodified: one of each kind that a pipeline or a cube can't simply cut into like blocks.

embedding  block  shared  block  shared  block  head     classes that differ, a layer that several blocks hold
                    |       ^                   ^        a dictionary that blocks fill for later ones
           +norm    +norm          code between blocks, lists that are called in turn
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.habits.arguments import gemma3n
from tests.habits.images import TransformersLoss, qwen2_vl, texts_with_images
from tests.harness import models
from tests.harness.models import Batch, build
from tests.harness.pool import Pool
from tests.harness.thorough import covered
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


class Staged(models.MLP):
    """Calls its stages by their names, as a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1, self.stage2, *_ = self.blocks
        self.stage3, self.stage4 = nn.Sequential(*self.blocks[2:5]), nn.Sequential(*self.blocks[5:])
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.stage1(self.embedding(x)))
        return self.head(self.stage4(self.stage3(x).tanh()))


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


def zamba() -> nn.Module:
    """Two classes of blocks; a transformer that blocks 1 and 3 share, on two ranks."""
    from transformers import ZambaConfig, ZambaForCausalLM

    mamba, hybrid = "linear_attention", "hybrid"
    config = ZambaConfig(
        vocab_size=37, hidden_size=16, attention_hidden_size=32, intermediate_size=32, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=2, attention_head_dim=16, n_mamba_heads=2, mamba_dt_rank=4,
        mamba_d_state=4, use_mamba_kernels=False, layers_block_type=[mamba, hybrid, mamba, hybrid, mamba, mamba],
    )  # fmt: skip
    return TransformersLoss(ZambaForCausalLM(config))


@dataclass(frozen=True)
class Case:
    """A model, its batches, the lists that are named, and the layouts, of which the default set takes the first."""

    model: Callable[[], Any]
    batches: Callable[[], list[Batch]]
    layouts: Sequence[Layout]
    blocks: str | tuple[str, ...] | None = None
    tolerance: float = 1e-10


PIPELINE, CUBE = Layout(2, 1, 1, step="auto"), Layout(1, 1, 1, cube=(1, 2, 1), step="auto")
BETWEEN = [
    PIPELINE, Layout(2, 1, 1), Layout(2, 1, 1, step="batch"), Layout(1, 1, 1, cube=(1, 2, 1)), Layout(4, 1, 1, "1f1b"),
]  # fmt: skip
ODD = partial(models.padded, (8, 6), (7, 5))
FP32 = 1e-6
"""for models that compute norms or states in fp32, whose roundings AdamW divides by roots"""

_XLM = ("model.attentions", "model.layer_norm1", "model.ffns", "model.layer_norm2")
KINDS = {
    "several classes, and a layer that blocks share": Case(zamba, ODD, [PIPELINE, CUBE], tolerance=FP32),
    "a heavier tower that texts don't reach": Case(
        partial(qwen2_vl, 64), partial(texts_with_images, ""), [PIPELINE, CUBE], tolerance=FP32
    ),
    "images in one tensor of patches": Case(qwen2_vl, texts_with_images, [PIPELINE, CUBE], tolerance=FP32),
    "a dictionary that blocks fill for later ones": Case(
        gemma3n, partial(models.windows, (8, 6)), [PIPELINE], tolerance=FP32
    ),
    "code between blocks": Case(funnel, tokens, BETWEEN),
    "lists that are called in turn": Case(xlm, tokens, BETWEEN, _XLM),
    "stages that are in no list": Case(
        Staged, partial(models.vectors, (8, 6)), BETWEEN, ("stage1", "stage2", "stage3[*]", "stage4[*]")
    ),
    "lengths that y doesn't divide": Case(partial(models.llama, kv_heads=2), ODD, [CUBE, PIPELINE], tolerance=FP32),
}
OTHERS = {
    "xlm, feed-forward alone": Case(xlm, tokens, BETWEEN, "model.ffns"),
    "flaubert": Case(partial(xlm, "Flaubert"), tokens, BETWEEN, _XLM),
    "poolformer": Case(poolformer, images, BETWEEN),
    "poolformer, in turn": Case(poolformer, images, BETWEEN, ("model.encoder.patch_embeddings", "model.encoder.block")),
    "pvt": Case(pvt, images, BETWEEN),
    "pvt, in turn": Case(pvt, images, BETWEEN, ("model.encoder.patch_embeddings", "model.encoder.block")),
}
CASES = KINDS | OTHERS
ALIKE = (
    "a heavier tower that texts don't reach", "lists that are called in turn", "images in one tensor of patches",
    "lengths that y doesn't divide",
)  # fmt: skip
"""much like their neighbours, or slow, so that only thorough tests run them"""
PAIRS = [(name, layout) for name, case in CASES.items() for layout in case.layouts]


def fit(name: str, layout: Layout) -> Outcome:
    """Train on one rank."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")
    warnings.filterwarnings("ignore", message=".*blocks return or store")
    case, callback = CASES[name], OutcomeCallback()
    training = Training(case.model, case.batches, DOUBLE)
    is_plain = layout.world_size == 1
    strategy = "auto" if is_plain else make_strategy(layout, blocks=case.blocks, loss_weight="auto")
    trainer = make_trainer(layout, max_steps=2, callbacks=[callback], strategy=strategy)
    module = build(case.model, DOUBLE)
    trainer.fit(module, make_loader(training.share(data_rank(layout), layout.data)))
    return callback.outcome


@pytest.mark.parametrize(
    ("name", "layout"),
    covered(PAIRS, by=[(name, case.layouts[0]) for name, case in KINDS.items() if name not in ALIKE]),
    ids=str,
)
def test_matches_one_process(pool: Pool, name: str, layout: Layout) -> None:
    (expected,) = pool.run(1, fit, name, Layout())
    outcome = merge(pool.run(layout.world_size, fit, name, layout), layout)
    assert_close(outcome.weights, expected.weights, CASES[name].tolerance)
