"""BERT of Hugging Face: norms behind, separate q, k and v."""

from lightning_hanayo.tensor3d.convert.specs.spec import BlockSpec, Part

_ATTENTION = Part(
    "attention.self",
    ("query", "key", "value"),
    input="hidden_states",
    head_size="attention_head_size",
    dropout="dropout.p",
)

BLOCKS = {
    "transformers.models.bert.modeling_bert.BertLayer": BlockSpec(
        streams=("hidden_states",),
        parts=(_ATTENTION, Part("intermediate", ("dense",))),
        second=("attention.output.dense", "output.dense"),
        functions=("intermediate.intermediate_act_fn",),
        expects={"chunk_size_feed_forward": 0},
    )
}
