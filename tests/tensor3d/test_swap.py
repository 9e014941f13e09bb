"""The swap: blocks of known kinds run in their own code over the grid, and equal themselves run whole."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.tensor3d.grid import Grid
from lightning_hanayo.tensor3d.inside import wrap
from lightning_hanayo.tensor3d.kinds.kind import BlockKind, Part
from lightning_hanayo.tensor3d.kinds.layers import leave
from lightning_hanayo.tensor3d.product import Keep
from lightning_hanayo.tensor3d.setting import Setting
from lightning_hanayo.tensor3d.swap import SwapPlan, plan_swap, register_block, register_layer
from recipes.bert.module import Block as BERTBlock
from recipes.gpt.module import Block as GPTBlock
from tests.harness.cube import Sizes, error, grid, part, process_group
from tests.harness.pool import Pool
from tests.tensor3d.comparing import gradient_errors, too_large

BATCH, WIDTH, HEADS = 4, 16, 4


def causal(length: int) -> Tensor:
    """Additive, [1, 1, length, length]."""
    return torch.full((1, 1, length, length), float("-inf"), dtype=torch.float64).triu(1)


def padding(length: int) -> Tensor:
    """Where there is something to see, [BATCH, length]: the first samples are shorter."""
    return torch.arange(length) < (length - torch.arange(BATCH).flip(0)).unsqueeze(1)


def tables(length: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Rotary tables, [BATCH, length, head_size] each: every sample begins somewhere else."""
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=head_size, num_attention_heads=1))
    positions = torch.arange(length) + torch.arange(BATCH).unsqueeze(1)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float64), positions)
    return cos, sin


@dataclass(frozen=True)
class Family:
    """A kind of block, what it is called with besides the stream, and what may differ, of the largest value."""

    make: Callable[[], nn.Module]
    arguments: Callable[[int], dict[str, Any]] = lambda length: {}
    allowed: float = 1e-10
    batch_first: bool = True


def gpt2(implementation: str) -> nn.Module:
    config = GPT2Config(n_embd=WIDTH, n_head=HEADS, attn_pdrop=0.0, resid_pdrop=0.0)
    config._attn_implementation = implementation
    return GPT2Block(config, 0)


def bert() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": HEADS}
    config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "sdpa"
    return BertLayer(config, 0)


def llama(layer: type[nn.Module], configuration: Any, **options: Any) -> nn.Module:
    """With twice as many heads for queries as for keys and values."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "head_dim": 4}
    config = configuration(**sizes, num_attention_heads=2 * HEADS, num_key_value_heads=HEADS, **options)
    config._attn_implementation = "sdpa"
    block: nn.Module = layer(config, 0)
    return block


def rotary(length: int) -> dict[str, Any]:
    return {"position_embeddings": tables(length, 4)}


FAMILIES = {
    "recipe gpt": Family(lambda: GPTBlock(WIDTH, HEADS, 0.0)),
    "recipe bert": Family(lambda: BERTBlock(WIDTH, HEADS, 0.0), lambda length: {"mask": padding(length)}),
    "gpt2": Family(lambda: gpt2("sdpa")),
    "gpt2 eager": Family(lambda: gpt2("eager"), lambda length: {"attention_mask": causal(length)}),
    "bert": Family(bert, lambda length: {"attention_mask": padding(length)[:, None, None]}),
    "llama": Family(lambda: llama(LlamaDecoderLayer, LlamaConfig, attention_bias=True, mlp_bias=True), rotary, 1e-5),
    "mistral": Family(lambda: llama(MistralDecoderLayer, MistralConfig), rotary, 1e-5),
    "qwen2": Family(lambda: llama(Qwen2DecoderLayer, Qwen2Config), rotary, 1e-5),
    "qwen3": Family(lambda: llama(Qwen3DecoderLayer, Qwen3Config), rotary, 1e-5),
}


def stack(family: Family) -> nn.ModuleList:
    """Two blocks, with random vectors too."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(family.make() for _ in range(2)).double()
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.3)
    return blocks


def own_parts(x: Tensor, ranks: Grid) -> Tensor:
    """This rank's of a residual stream [batch, sequence, features], the sequence padded to whole parts."""
    missing = -x.shape[1] % ranks.size("y")
    return part(torch.nn.functional.pad(x, (0, 0, 0, missing)), ranks, "x", "y", "z")


def own_arguments(arguments: Any, ranks: Grid) -> Any:
    """This rank's of what else a block is called with: what has something for each sample is cut along x."""
    if isinstance(arguments, dict):
        return {name: own_arguments(value, ranks) for name, value in arguments.items()}
    if isinstance(arguments, tuple):
        return tuple(own_arguments(value, ranks) for value in arguments)
    return part(arguments, ranks, "x") if isinstance(arguments, Tensor) and arguments.shape[0] == BATCH else arguments


def run(blocks: nn.ModuleList, x: Tensor, arguments: dict[str, Any]) -> Tensor:
    for block in blocks:
        x = block(x, **arguments)
    return x


def compared(family: Family, length: int, ranks: Grid, keep: Keep) -> dict[str, float]:
    """Errors of output and all gradients, in units of what is allowed."""
    dense = stack(family)
    blocks = deepcopy(dense)
    plan = plan_swap(list(blocks), "blocks", ranks.sizes)
    setting = Setting(ranks, keep, length=length)
    plan.install(list(blocks), setting)
    assert plan.known and (plan.batch_dim == 0) is family.batch_first
    x, gradient = torch.randn(2, BATCH, length, WIDTH, dtype=torch.float64)
    own = own_parts(x, ranks).requires_grad_()
    y = run(dense, x.requires_grad_(), family.arguments(length))
    own_y = run(blocks, own, own_arguments(family.arguments(length), ranks))
    y.backward(gradient)
    own_y.backward(own_parts(gradient, ranks))
    assert x.grad is not None and own.grad is not None
    here = own_parts(torch.ones_like(x, requires_grad=False), ranks)
    errors = {"y": error(own_y * here, own_parts(y.detach(), ranks))}
    errors["dx"] = error(own.grad, own_parts(x.grad, ranks))
    errors |= gradient_errors(blocks, dense, ranks)
    assert len(errors) - 2 == len(list(blocks.parameters()))
    errors |= {what: float(g.abs().max()) for what, g in vanishing(blocks, dense) if what in errors}
    return {what: value / family.allowed for what, value in errors.items()}


def vanishing(blocks: nn.ModuleList, dense: nn.ModuleList) -> Iterator[tuple[str, Tensor]]:
    """Gradients that are rounding alone: a key's bias adds the same to all of a query's scores."""
    for (name, own), whole in zip(blocks.named_parameters(), dense.parameters(), strict=True):
        if own.grad is not None and whole.grad is not None and whole.grad.abs().max() < 1e-12:
            yield name, own.grad


def families(grids: list[Sizes], names: list[str]) -> dict[str, float]:
    errors: dict[str, float] = {}
    with process_group():
        for sizes in grids:
            ranks = grid(sizes)
            for name, (length, keep) in product(names, ((6, "gathered"), (5, "shards"))):
                case = compared(FAMILIES[name], length, ranks, keep)  # type: ignore[arg-type]
                errors |= {f"{sizes} {name} {length} {what}": value for what, value in case.items()}
    return errors


@pytest.mark.parametrize("grids", [[(1, 2, 1), (1, 1, 2), (2, 1, 1)], [(2, 2, 2)]], ids=["2 ranks", "8 ranks"])
def test_known_blocks_equal_themselves_run_whole(pool: Pool, grids: list[Sizes]) -> None:
    assert too_large(pool.run(prod(grids[0]), families, grids, list(FAMILIES))) == []
