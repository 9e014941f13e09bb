"""GPT-2 of Hugging Face: norms in front, q, k and v in one `Conv1D`."""

from lightning_hanayo.tensor3d.convert.specs.spec import BlockSpec, Part

_ATTENTION = Part("attn", ("c_attn",), head_size="head_dim", fused=3, local=("split_size",), dropout="attn_dropout.p")

BLOCKS = {
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": BlockSpec(
        streams=("hidden_states",),
        parts=(_ATTENTION, Part("mlp", ("c_fc",))),
        second=("attn.c_proj", "mlp.c_proj"),
        functions=("mlp.act",),
    )
}
