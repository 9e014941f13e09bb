"""The blocks that are parallelized whole: torch's, Hugging Face's GPT-2, BERT, and Llama with its like, and the user's.

They are registered by class name: what isn't installed needn't be imported, and `transformers` and torch aren't.
"""

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lightning_hanayo.tensor3d.convert.specs.spec import BlockSpec, ProjectionGroup, class_name

if TYPE_CHECKING:
    from torch import nn


def register_block(block: "type[nn.Module] | str", spec: BlockSpec) -> None:
    """Register a class of blocks: a stack of them is parallelized whole, in its own code.

    Example:
        >>> up = ProjectionGroup("", ("up",))
        >>> register_block(Block, BlockSpec(streams=("x",), projections=(up,), row_parallel=("down",)))

    Args:
        block: the class, or its qualified name, as "my_package.models.Block". Subclasses don't count.
        spec: describes it.
    """
    _BLOCKS[block if isinstance(block, str) else class_name(block)] = spec


def block_spec(block: "nn.Module") -> BlockSpec | None:
    """Returns the spec of a block if exactly its class is registered."""
    return _BLOCKS.get(class_name(type(block)))


def _torch_layer(*streams: str, **options: Any) -> BlockSpec:
    """Norms in front or behind, batch or sequence first."""
    return BlockSpec(
        streams=streams,
        projections=(ProjectionGroup("", ("linear1",)),),
        row_parallel=("linear2",),
        batch_first=attrgetter("self_attn.batch_first"),
        elementwise_functions=("activation",),
        **options,
    )


_TORCH_ENCODER = _torch_layer(
    "src",
    overrides={"activation_relu_or_gelu": 0},  # the fused kernel of evaluation reads all weights itself
)

_GPT2_ATTENTION = ProjectionGroup(
    "attn", ("c_attn",), head_size="head_dim", num_fused=3, sharded_counts=("split_size",), dropout="attn_dropout.p"
)

_BERT_ATTENTION = ProjectionGroup(
    "attention.self",
    ("query", "key", "value"),
    input="hidden_states",
    head_size="attention_head_size",
    dropout="dropout.p",
)

_GPT2 = BlockSpec(
    streams=("hidden_states",),
    projections=(_GPT2_ATTENTION, ProjectionGroup("mlp", ("c_fc",))),
    row_parallel=("attn.c_proj", "mlp.c_proj"),
    elementwise_functions=("mlp.act",),
)

_BERT = BlockSpec(
    streams=("hidden_states",),
    projections=(_BERT_ATTENTION, ProjectionGroup("intermediate", ("dense",))),
    row_parallel=("attention.output.dense", "output.dense"),
    elementwise_functions=("intermediate.intermediate_act_fn",),
    required_values={"chunk_size_feed_forward": 0},
)


def _llama(replicated_norms: tuple[str, ...] = ()) -> BlockSpec:
    """RMSNorms in front, a gated MLP, k and v with fewer heads than q."""
    attention = ProjectionGroup(
        "self_attn",
        ("q_proj", "k_proj", "v_proj"),
        input="hidden_states",
        head_size="head_dim",
        replicated_norms=replicated_norms,
        dropout="attention_dropout",
    )
    return BlockSpec(
        streams=("hidden_states",),
        projections=(attention, ProjectionGroup("mlp", ("gate_proj", "up_proj"), input="x")),
        row_parallel=("self_attn.o_proj", "mlp.down_proj"),
        elementwise_functions=("mlp.act_fn",),
    )


_LLAMA_LIKE = ("llama.modeling_llama.Llama", "mistral.modeling_mistral.Mistral", "qwen2.modeling_qwen2.Qwen2")
_QWEN3 = "qwen3.modeling_qwen3.Qwen3"

RMS_NORMS = tuple(f"transformers.models.{name}RMSNorm" for name in (*_LLAMA_LIKE, _QWEN3))
"""Hugging Face's: they compute the same, each in a class of its own"""

_BLOCKS = {
    "torch.nn.modules.transformer.TransformerEncoderLayer": _TORCH_ENCODER,
    "torch.nn.modules.transformer.TransformerDecoderLayer": _torch_layer("tgt", "memory"),
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": _GPT2,
    "transformers.models.bert.modeling_bert.BertLayer": _BERT,
    **{f"transformers.models.{name}DecoderLayer": _llama() for name in _LLAMA_LIKE},
    f"transformers.models.{_QWEN3}DecoderLayer": _llama(replicated_norms=("q_norm", "k_norm")),
}
