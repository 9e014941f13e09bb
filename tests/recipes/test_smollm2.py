"""The SmolLM2 recipe has the published size, and trains over a wave and a cube as in one process, with LoRA, too."""

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from lightning import LightningModule
from safetensors.torch import load_model
from transformers import LlamaForCausalLM

from recipes.smollm2.add_lora import main as write_lora
from recipes.smollm2.module import SmolLM2
from tests.harness import models
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, run

PUBLISHED = 134_515_008
"""parameters of SmolLM2-135M"""
LAYOUTS = [Layout(2, 2, 1), Layout(1, 1, 1, cube=(2, 1, 1))]


def small(lora_rank: int) -> LightningModule:
    module = SmolLM2(
        vocab_size=models.VOCABULARY, context=16, num_layers=8, width=24, feed_forward=32, num_heads=3,
        num_key_value_heads=1, lora_rank=lora_rank, learning_rate=1e-2,
    )  # fmt: skip
    module.configure_model()
    return module


def test_it_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        module = SmolLM2()
        module.configure_model()
    assert sum(parameter.numel() for parameter in module.parameters()) == PUBLISHED


@pytest.mark.parametrize(("layout", "lora_rank"), covered(product(LAYOUTS, [0, 4]), by=[(LAYOUTS[0], 4)]), ids=str)
def test_it_trains_as_in_one_process(pool: Pool, layout: Layout, lora_rank: int) -> None:
    tokens = partial(models.texts, (8, 8, 8))
    training = Training(partial(small, lora_rank), tokens, torch.float64, steps=3, clip=1.0, loss_weight="tokens")
    assert_close(run(pool, training, layout).weights, plain(pool, training).weights, 1e-10)


def test_lora_begins_with_the_pretrained_model(tmp_path: Path) -> None:
    module = small(0)
    module.net.save_pretrained(tmp_path / "pretrained")
    write_lora(tmp_path / "pretrained", tmp_path / "changed", 4)
    changed = small(4)
    assert isinstance(changed.net, LlamaForCausalLM)
    load_model(changed.net, tmp_path / "changed/model.safetensors")
    tokens = torch.arange(12)[None]
    assert torch.equal(changed(tokens), module(tokens))
    trained = [name for name, parameter in changed.named_parameters() if parameter.requires_grad]
    assert len(trained) == 8 * 4 * 2 and all("self_attn" in name for name in trained)
