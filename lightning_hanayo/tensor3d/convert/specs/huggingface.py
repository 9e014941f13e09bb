"""The specs of Hugging Face's GPT-2, BERT, and Llama with its like, by class name: `transformers` isn't imported."""

from lightning_hanayo.tensor3d.convert.specs.spec import BlockSpec, ProjectionGroup

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

BLOCKS = {
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": _GPT2,
    "transformers.models.bert.modeling_bert.BertLayer": _BERT,
    **{f"transformers.models.{name}DecoderLayer": _llama() for name in _LLAMA_LIKE},
    f"transformers.models.{_QWEN3}DecoderLayer": _llama(replicated_norms=("q_norm", "k_norm")),
}

RMS_NORMS = tuple(f"transformers.models.{name}RMSNorm" for name in (*_LLAMA_LIKE, _QWEN3))
"""they compute the same, each in a class of its own"""
