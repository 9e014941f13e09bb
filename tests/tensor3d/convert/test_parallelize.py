"""Registered blocks run in their own code over the mesh, and equal themselves run whole."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import BertConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.tensor_parallel import BlockSpec, ProjectionGroup, elementwise, register_block, register_layer
from lightning_hanayo.tensor_parallel.convert.parallelize import ParallelizePlan, plan_parallelize
from lightning_hanayo.tensor_parallel.convert.registered_block import parallelize_group
from lightning_hanayo.tensor_parallel.layers.linear import ShardedLinear, parallelize_linear
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import SEQUENCE, Keep
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from recipes.bert.module import Block as BERTBlock
from recipes.gpt.module import Block as GPTBlock
from tests.harness.mesh import Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.tensor3d.comparing import gradient_errors, too_large

BATCH, WIDTH, HEADS = 4, 16, 4
MEMORY = 8
"""positions of a decoder's memory"""


def causal(length: int) -> Tensor:
    """Additive, [1, 1, length, length]."""
    return torch.full((1, 1, length, length), float("-inf"), dtype=torch.float64).triu(1)


def padding(length: int) -> Tensor:
    """True for tokens, False for padding, [BATCH, length]: the first samples are shorter."""
    return torch.arange(length) < (length - torch.arange(BATCH).flip(0)).unsqueeze(1)


def tables(length: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Rotary tables, [BATCH, length, head_size] each: every sample has other positions."""
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=head_size, num_attention_heads=1))
    positions = torch.arange(length) + torch.arange(BATCH).unsqueeze(1)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float64), positions)
    return cos, sin


@dataclass(frozen=True)
class Family:
    """A class of blocks, the arguments besides the stream, and the allowed error, relative to the largest value."""

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


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, **options)


def decoder(**options: Any) -> nn.Module:
    return nn.TransformerDecoderLayer(WIDTH, HEADS, 24, dropout=0.0, **options)


def padded_keys(length: int) -> dict[str, Any]:
    return {"src_key_padding_mask": ~padding(length)}


def remembered(length: int) -> dict[str, Any]:
    return {"memory": torch.randn(BATCH, MEMORY, WIDTH, dtype=torch.float64), "tgt_mask": causal(length)[0, 0]}


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
    "encoder": Family(lambda: encoder(batch_first=True, norm_first=True), padded_keys),
    "encoder, sequence first": Family(encoder, batch_first=False),
    "decoder": Family(lambda: decoder(batch_first=True), remembered),
}


def stack(family: Family) -> nn.ModuleList:
    """Two blocks, with random vectors too."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(family.make() for _ in range(2)).double()
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.3)
    return blocks


def own_parts(x: Tensor, ranks: Mesh) -> Tensor:
    """This rank's shard of a residual stream [batch, sequence, features], the sequence padded to whole parts."""
    missing = -x.shape[1] % ranks.size("y")
    return part(pad(x, (0, 0, 0, missing)), ranks, "x", "y", "z")


def own_arguments(arguments: Any, ranks: Mesh) -> Any:
    """This rank's part of a block's other arguments: what has something for each sample is sharded along x."""
    if isinstance(arguments, dict):
        own = {name: own_arguments(value, ranks) for name, value in arguments.items()}
        return own | {name: own_parts(value, ranks) for name, value in arguments.items() if name == "memory"}
    if isinstance(arguments, tuple):
        return tuple(own_arguments(value, ranks) for value in arguments)
    return part(arguments, ranks, "x") if isinstance(arguments, Tensor) and arguments.shape[0] == BATCH else arguments


def run(blocks: nn.ModuleList, x: Tensor, arguments: dict[str, Any], batch_first: bool) -> Tensor:
    x = x if batch_first else x.transpose(0, 1)
    for block in blocks:
        x = block(x, **arguments)
    return x if batch_first else x.transpose(0, 1)


def compared(family: Family, length: int, ranks: Mesh, keep: Keep) -> dict[str, float]:
    """Errors of output and all gradients, in units of what is allowed."""
    reference = stack(family)
    blocks = deepcopy(reference)
    plan = plan_parallelize(list(blocks), "blocks", ranks.sizes)
    context = StageContext(ranks, keep, sequence_length=(length, MEMORY))
    plan.install(list(blocks), context)
    assert plan.is_registered and (plan.batch_dim == 0) is family.batch_first
    x, gradient = torch.randn(2, BATCH, length, WIDTH, dtype=torch.float64)
    own = own_parts(x, ranks).requires_grad_()
    arguments = family.arguments(length)
    y = run(reference, x.requires_grad_(), arguments, family.batch_first)
    own_y = run(blocks, own, own_arguments(arguments, ranks), family.batch_first)
    with torch.no_grad():  # where torch's own layers would take a fused path, which reads their weights
        evaluated = run(blocks.eval(), own, own_arguments(arguments, ranks), family.batch_first)
    y.backward(gradient)
    own_y.backward(own_parts(gradient, ranks))
    assert x.grad is not None and own.grad is not None
    here = own_parts(torch.ones_like(gradient), ranks)
    errors = {"y": error(own_y * here, own_parts(y.detach(), ranks))}
    errors["evaluated"] = error(evaluated, own_y.detach())
    errors["dx"] = error(own.grad, own_parts(x.grad, ranks))
    errors |= gradient_errors(blocks, reference, ranks)
    assert len(errors) - 3 == len(list(blocks.parameters()))
    errors |= {what: float(g.abs().max()) for what, g in vanishing(blocks, reference) if what in errors}
    return {what: value / family.allowed for what, value in errors.items()}


def vanishing(blocks: nn.ModuleList, reference: nn.ModuleList) -> Iterator[tuple[str, Tensor]]:
    """Gradients that are rounding alone: a key's bias adds the same to all of a query's scores."""
    for (name, own), whole in zip(blocks.named_parameters(), reference.parameters(), strict=True):
        if own.grad is not None and whole.grad is not None and whole.grad.abs().max() < 1e-12:
            yield name, own.grad


def families(cases: list[tuple[Sizes, int, Keep]]) -> dict[str, float]:
    errors: dict[str, float] = {}
    with process_group():
        for sizes, length, keep in cases:
            ranks = make_mesh(sizes)
            for name, family in FAMILIES.items():
                case = compared(family, length, ranks, keep)
                errors |= {f"{sizes} {name} {length} {what}": value for what, value in case.items()}
    return errors


CASES: list[list[tuple[Sizes, int, Keep]]] = [
    [((1, 2, 1), 5, "shards"), ((1, 1, 2), 6, "gathered"), ((2, 1, 1), 5, "shards")],
    [((2, 2, 2), 5, "gathered")],
]


@pytest.mark.parametrize("cases", covered(CASES, by=CASES[:1]), ids=["2 ranks", "8 ranks"])
def test_registered_blocks_equal_themselves_run_whole(pool: Pool, cases: list[tuple[Sizes, int, Keep]]) -> None:
    assert too_large(pool.run(prod(cases[0][0]), families, cases)) == []


def under_autocast(sizes: Sizes) -> dict[str, float]:
    """Under autocast, errors are as small as bf16 allows."""
    errors: dict[str, float] = {}
    with process_group():
        ranks = make_mesh(sizes)
        for keep in ("gathered", "shards"):
            torch.manual_seed(0)
            reference = nn.ModuleList([BERTBlock(WIDTH, HEADS, 0.0)])
            blocks = deepcopy(reference)
            plan_parallelize(list(blocks), "blocks", sizes).install(list(blocks), StageContext(ranks, keep))  # type: ignore[arg-type]
            x = torch.randn(BATCH, 6, WIDTH)
            with torch.autocast("cpu", torch.bfloat16):
                y, own_y = reference[0](x), blocks[0](own_parts(x, ranks))
            y.square().sum().backward()
            own_y.square().sum().backward()
            errors |= {f"{keep} y": error(own_y, own_parts(y.detach(), ranks)) / 5e-2}
            case = gradient_errors(blocks, reference, ranks)
            errors |= {f"{keep} {what}": value / 5e-2 for what, value in case.items() if "key.bias" not in what}
    return errors


def test_autocast_equals_that_of_the_block_run_whole(pool: Pool) -> None:
    assert too_large(pool.run(4, under_autocast, (1, 2, 2))) == []


class Noise(nn.Module):
    """Draws in its forward, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.probability = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return torch.rand(4)


def drawn(sizes: Sizes) -> dict[str, list[float]]:
    with process_group():
        torch.manual_seed(0)
        noise = Noise()
        parallelize_group(
            noise, ProjectionGroup("", (), dropout="probability"), SEQUENCE, StageContext(make_mesh(sizes))
        )
        training = noise(torch.zeros(1)).tolist()
        after = torch.rand(4).tolist()
        return {"training": training, "after": after, "evaluation": noise.eval()(torch.zeros(1)).tolist()}


def test_an_attention_draws_from_each_ranks_own_stream(pool: Pool) -> None:
    ranks = pool.run(2, drawn, (1, 2, 1))
    assert ranks[0]["training"] != ranks[1]["training"]
    assert ranks[0]["after"] == ranks[1]["after"] and ranks[0]["evaluation"] == ranks[1]["evaluation"]


def planned(blocks: list[nn.Module], sizes: Sizes = (1, 2, 2)) -> ParallelizePlan:
    return plan_parallelize(blocks, "model.layers", sizes)


def test_the_report_folds_equal_blocks() -> None:
    plan = planned([gpt2("sdpa") for _ in range(3)])
    assert plan.streams == ("hidden_states",) and "not converted" not in {row.outcome for row in plan.rows}
    assert plan.report.splitlines() == [
        "model.layers: 3 registered blocks, parallelized whole over the mesh (1, 2, 2)",
        "  model.layers.0..2.ln_1                 nn.LayerNorm    3-D",
        "  model.layers.0..2.attn.c_attn          Conv1D 16->48   3-D, column-parallel",
        "  model.layers.0..2.attn.c_proj          Conv1D 16->16   3-D, row-parallel",
        "  model.layers.0..2.attn.attn_dropout    nn.Dropout      3-D",
        "  model.layers.0..2.attn.resid_dropout   nn.Dropout      3-D",
        "  model.layers.0..2.ln_2                 nn.LayerNorm    3-D",
        "  model.layers.0..2.mlp.c_fc             Conv1D 16->64   3-D, column-parallel",
        "  model.layers.0..2.mlp.c_proj           Conv1D 64->16   3-D, row-parallel",
        "  model.layers.0..2.mlp.dropout          nn.Dropout      3-D",
    ]
    assert plan.rows[1].path == "attn.c_attn"


class LoRALinear(nn.Linear):
    """Any subclass may compute something else."""


def with_subclass(block: Any) -> None:
    block.self_attn.q_proj = LoRALinear(WIDTH, 32)


def with_shared_weight(block: Any) -> None:
    block.mlp.up_proj.weight = block.mlp.gate_proj.weight


def with_parametrization(block: Any) -> None:
    nn.utils.parametrizations.weight_norm(block.mlp.down_proj)


def with_pruning(block: Any) -> None:
    nn.utils.prune.l1_unstructured(block.mlp.down_proj, "weight", 0.5)


def with_hook(block: Any) -> None:
    block.mlp.register_forward_hook(lambda module, args, output: None)


def with_weight_hook(block: Any) -> None:
    block.mlp.up_proj.weight.register_hook(lambda gradient: gradient)


def with_own_forward(block: Any) -> None:
    block.mlp.forward = lambda x: x


def with_softmax(block: Any) -> None:
    block.mlp.act_fn = nn.Softmax(-1)


def with_parameter(block: Any) -> None:
    block.gain = nn.Parameter(torch.ones(()))


def with_stranger(block: Any) -> None:
    block.mlp.gate = nn.Linear(WIDTH, 2)


def with_other_attention(block: Any) -> None:
    block.self_attn.__class__ = type("Mine", (type(block.self_attn),), {"__module__": "elsewhere"})


REASONS = {
    with_subclass: "q_proj is a tests.tensor3d.convert.test_parallelize.LoRALinear, not an nn.Linear",
    with_shared_weight: "model.layers.1.mlp.gate_proj: its weight is another module's too",
    with_parametrization: "model.layers.1.mlp.down_proj is a torch.nn.utils.parametrize.ParametrizedLinear, not an",
    with_pruning: "model.layers.1.mlp.down_proj: its weight is computed from other parameters",
    with_hook: "model.layers.1.mlp has hooks",
    with_weight_hook: "model.layers.1.mlp.up_proj: its parameters have hooks",
    with_own_forward: "model.layers.1.mlp has hooks or a forward of its own",
    with_softmax: "model.layers.1.mlp.act_fn is a nn.Softmax, which isn't a registered layer",
    with_parameter: "model.layers.1.gain is a parameter that isn't a layer's",
    with_stranger: "model.layers.1.mlp.gate is a nn.Linear, which isn't a registered layer",
    with_other_attention: "model.layers.1.self_attn is a elsewhere.Mine, which isn't a registered layer",
}


@pytest.mark.parametrize("change", REASONS, ids=lambda change: change.__name__)
def test_a_block_that_differs_from_its_spec_is_generic_and_reported(change: Callable[[Any], None]) -> None:
    blocks = [llama(LlamaDecoderLayer, LlamaConfig) for _ in range(2)]
    change(blocks[1])
    plan = planned(blocks)
    assert not plan.is_registered and plan.streams == () and REASONS[change] in plan.report
    assert all(row.outcome == "not converted" for row in plan.rows if "norm" in row.path)


def test_the_report_says_why_a_layer_is_not_converted() -> None:
    blocks = [llama(LlamaDecoderLayer, LlamaConfig) for _ in range(2)]
    for change in (with_subclass, with_pruning, with_parameter):
        change(blocks[1])
    blocks[0].mlp.up_proj.weight = blocks[1].mlp.up_proj.weight  # type: ignore[union-attr]
    rows = planned(blocks).rows
    unconverted = [row for row in rows if row.outcome == "not converted"]
    assert {(f"model.layers.{row.block}.{row.path}".removesuffix("."), row.reason) for row in unconverted} == {
        *((f"model.layers.{i}.{name}_layernorm", "no linear layer") for i in range(2) for name in NORMS),
        *((f"model.layers.{i}.mlp.up_proj", "its weight is another module's too") for i in range(2)),
        ("model.layers.1.self_attn.q_proj", "a subclass"),
        ("model.layers.1.mlp.down_proj", "its weight is computed from other parameters"),
        ("model.layers.1", "no linear layer"),
    }


NORMS = ("input", "post_attention")


def test_a_parameter_that_is_used_outside_is_not_converted() -> None:
    block = gpt2("sdpa")
    plan = plan_parallelize([block], "h", (1, 2, 2), outside=[block.mlp.c_fc.weight])  # type: ignore[union-attr, list-item]
    assert not plan.is_registered and "h.0.mlp.c_fc: its weight is another module's too" in plan.report


def test_a_function_that_may_look_across_features_is_refused() -> None:
    blocks = [encoder(activation=lambda x: x / x.sum(-1, keepdim=True)), encoder()]
    assert "model.layers.0.activation is" in planned(blocks).report


def test_blocks_that_differ_in_their_streams_are_generic() -> None:
    assert "in another order" in planned([encoder(batch_first=True), encoder()]).report
    assert planned([encoder(), encoder()]).sequence_dim == 0


@pytest.mark.parametrize(
    ("block", "sizes", "message"),
    [
        (lambda: gpt2("sdpa"), (1, 8, 1), "model.layers.0.attn.c_attn has 4 heads, which don't divide over y . z = 8"),
        (
            lambda: llama(LlamaDecoderLayer, LlamaConfig),
            (2, 4, 2),
            "model.layers.0.self_attn.k_proj has 4 heads, which",
        ),
        (encoder, (1, 3, 1), "model.layers.0.self_attn has 4 heads, .* No mesh of 3 ranks fits"),
        (encoder, (1, 2, 4), r"Meshes of 8 ranks that fit: \(2, 1, 4\), \(2, 2, 2\), \(2, 4, 1\)"),
        (lambda: GPTBlock(18, 3, 0.0), (1, 1, 4), r"Meshes of 4 ranks that fit: \(4, 1, 1\)"),
    ],
)
def test_sizes_that_do_not_divide_are_one_error(block: Callable[[], nn.Module], sizes: Sizes, message: str) -> None:
    with pytest.raises(HanayoError, match=message):
        planned([block()], sizes)


class Swish(nn.Module):
    """An activation that isn't registered."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.5 * x)


class Mine(nn.Module):
    """A user's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.RMSNorm(8), nn.Linear(8, 12), Swish(), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return out


def test_a_users_block_is_registered_in_two_lines() -> None:
    assert "model.layers.0 is a tests.tensor3d.convert.test_parallelize.Mine, which isn't registered" in str(
        planned([Mine()]).report
    )
    register_block(Mine, BlockSpec(("x",), (ProjectionGroup("", ("up",)),), ("down",)))
    assert "model.layers.0.act is a tests.tensor3d.convert.test_parallelize.Swish, which" in str(
        planned([Mine()]).report
    )
    register_layer(Swish, elementwise)
    assert planned([Mine()]).is_registered


class Positional(nn.Module):
    """Its forward takes what names can't pass."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, /, *factors: float) -> Tensor:
        out: Tensor = self.q(x) + sum(factors) * self.k(x)
        return out


def test_a_forward_whose_input_is_gathered_keeps_its_signature() -> None:
    module, x, context = Positional(), torch.randn(2, 4, 8), StageContext(Mesh.single())
    expected = module(x, 1.0, 2.0)
    parallelize_group(module, ProjectionGroup("", ("q", "k"), "x"), SEQUENCE, context)
    torch.testing.assert_close(module(x, 1.0, 2.0), expected)


class OwnLinear(nn.Linear):
    pass


def test_a_layer_of_a_users_class_is_converted_once_more() -> None:
    layer = OwnLinear(8, 8)
    for _ in range(2):
        parallelize_linear(layer, StageContext(Mesh.single()), SEQUENCE)
    assert isinstance(layer, OwnLinear)
    assert isinstance(layer, ShardedLinear)
