"""Llama and its like of Hugging Face: RMSNorms in front, gated MLPs, k and v with fewer heads than q."""

from lightning_hanayo.tensor3d.convert.specs.spec import BlockSpec, Part


def _kind(whole: tuple[str, ...] = ()) -> BlockSpec:
    attention = Part(
        "self_attn",
        ("q_proj", "k_proj", "v_proj"),
        input="hidden_states",
        head_size="head_dim",
        whole=whole,
        dropout="attention_dropout",
    )
    return BlockSpec(
        streams=("hidden_states",),
        parts=(attention, Part("mlp", ("gate_proj", "up_proj"), input="x")),
        second=("self_attn.o_proj", "mlp.down_proj"),
        functions=("mlp.act_fn",),
    )


_FAMILY = ("llama.modeling_llama.Llama", "mistral.modeling_mistral.Mistral", "qwen2.modeling_qwen2.Qwen2")

BLOCKS = {f"transformers.models.{name}DecoderLayer": _kind() for name in _FAMILY} | {
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": _kind(whole=("q_norm", "k_norm"))
}

NORMS = tuple(f"transformers.models.{name}RMSNorm" for name in (*_FAMILY, "qwen3.modeling_qwen3.Qwen3"))
"""they compute the same, each in a class of its own"""
