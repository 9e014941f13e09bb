"""Experts that a cube's ranks share train as those of one process do, on uneven shares, and where experts get no token.

experts 0 .. 4 of each block on the cube (1, 2, 2):   0 1 | 2 3 | 4 | -      tokens go to their experts and back
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from lightning_hanayo.errors import HanayoError
from tests.equivalence.test_layout_pairs import train
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, make_loader, make_trainer, merge, run

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


class Penalised(Mixture):
    """Blocks compute with the weights of their experts themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReadsWeights() for _ in range(4))


class ReadsWeights(Routed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + 0.1 * self.experts.down_proj.square().mean())


def sequences(sizes: tuple[int, ...] = (8, 8, 6)) -> list[Batch]:
    random = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(size, 6, models.WIDTH, generator=random),
            "y": torch.randint(models.CLASSES, (size,), generator=random),
        }
        for size in sizes
    ]


def cubes(*sizes: tuple[int, int, int], **options: Any) -> list[Layout]:
    return [Layout(num_microbatches=2, experts="cube", cube=one, **options) for one in sizes]


PIPELINE = Layout(2, 1, 1, cube=(1, 2, 1), experts="cube")
CUBES = cubes((1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 3))
LAYOUTS = [
    *CUBES,
    PIPELINE,
    replace(PIPELINE, schedule="hanayo-zb"),
    replace(PIPELINE, recompute="blocks"),
    *cubes((1, 2, 2), recompute="blocks"),
    *cubes((1, 2, 1), (1, 3, 1), data=2, shard_optimizer=True),
    *cubes((1, 2, 1), outside="replicate"),
    *cubes((2, 1, 2), weights="batch"),
]


@pytest.mark.parametrize(
    ("model", "layout"),
    covered(
        [
            *((model, layout) for model in (Mixture, Skewed) for layout in LAYOUTS),
            *((Penalised, layout) for layout in (CUBES[2], PIPELINE)),
        ],
        by=[(Mixture, LAYOUTS[8])],
    ),
    ids=str,
)
def test_it_trains_as_in_one_process(pool: Pool, model: type[LightningModule], layout: Layout) -> None:
    training = Training(model, sequences, torch.float64, steps=3, clip=0.5)
    actual, expected = run(pool, training, layout), plain(pool, training)
    assert_close(actual.gradients, expected.gradients, 1e-10)
    assert_close(actual.weights, expected.weights, 1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (CUBES[2], CUBES[4]),
        (PIPELINE, Layout(1)),
        (Layout(2, 1, 1), PIPELINE),
        (CUBES[3], replace(CUBES[3], experts="whole")),
    ],
    ids=str,
)
def test_a_layout_reads_the_checkpoints_of_another(pool: Pool, tmp_path: Path, writer: Layout, reader: Layout) -> None:
    training, half = Training(Mixture, sequences, torch.float64), tmp_path / "half.ckpt"
    (whole,) = pool.run(1, train, training, Layout(1), 2, tmp_path / "whole.ckpt")
    pool.run(writer.world_size, train, training, writer, 1, half)
    ranks = pool.run(reader.world_size, train, training, reader, 2, tmp_path / "full.ckpt", half)
    assert_close(merge(ranks, reader).weights, whole.weights, 1e-9)


SIZES = {"vocab_size": models.VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 3},
    "qwen3_moe": {"moe_intermediate_size": 8, "num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "deepseek_v3": {
        "moe_intermediate_size": 8, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
        "first_k_dense_replace": 0, "intermediate_size": 24,
    },
    "gpt_oss": {
        "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2,
        "head_dim": 4,
    },
}  # fmt: skip


def of_transformers(kind: str, implementation: str) -> LightningModule:
    """Its routers and norms compute in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SIZES | KINDS[kind], experts_implementation=implementation)
    return models.HuggingFace(AutoModelForCausalLM.from_config(config))


def of_tokens() -> list[Batch]:
    return models.texts((8, 8, 8))


@pytest.mark.parametrize(
    ("kind", "implementation", "layout"),
    covered(
        [
            (kind, implementation, layout)
            for kind in KINDS
            for implementation in ("grouped_mm", "batched_mm", "eager")
            for layout in (CUBES[2], PIPELINE)
        ],
        by=[],
    ),
    ids=str,
)
def test_models_of_transformers_train_as_in_one_process(
    pool: Pool, kind: str, implementation: str, layout: Layout
) -> None:
    model = partial(of_transformers, kind, implementation)
    training = Training(model, of_tokens, steps=3, loss_weight="shifted_tokens")
    actual, expected = run(pool, training, layout), plain(pool, training)
    largest = max(one.abs().max().item() for one in expected.gradients.values())
    assert_close(actual.gradients, expected.gradients, 1e-5 * largest)


def refused(model: type[LightningModule], layout: Layout) -> str:
    with pytest.raises(HanayoError) as error:
        make_trainer(layout, max_steps=1).fit(model(), make_loader(models.vectors((8,))))
    return str(error.value)


def test_blocks_without_fused_experts_are_refused(pool: Pool) -> None:
    layout = CUBES[0]
    for text in pool.run(layout.world_size, refused, models.MLP, layout):
        assert "experts='cube': the blocks of blocks have no experts that a cube's ranks could share" in text
