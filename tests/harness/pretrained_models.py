"""Small models of transformers by the names of their classes, with the values of trained ones."""

from typing import Any

from torch import nn

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
BART = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": SIZES,
    "BertForSequenceClassification": SIZES,
    "BloomForCausalLM": {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "FalconForCausalLM": SIZES,
    "Gemma2ForCausalLM": SIZES | {"num_key_value_heads": 2, "head_dim": 8},
    "GPTNeoXForCausalLM": SIZES,
    "MambaForCausalLM": {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "MixtralForCausalLM": SIZES | {"num_key_value_heads": 2, "num_local_experts": 2},
    "OPTForCausalLM": {
        "vocab_size": 61, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    },
    "Phi3ForCausalLM": SIZES | {"pad_token_id": 0},
    "Qwen3ForCausalLM": SIZES | {"num_key_value_heads": 2, "head_dim": 8},
    "T5ForConditionalGeneration": {
        "vocab_size": 61, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4,
    },
    "ViTForImageClassification": SIZES | {"image_size": 32, "patch_size": 8},
    "WhisperForConditionalGeneration": BART
    | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
}  # fmt: skip


def trained(name: str, sizes: dict[str, Any]) -> Any:
    """A model with other values than initial ones."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # its thread would outlive the test
    cls = getattr(transformers, name)
    known = {key: value for key, value in sizes.items() if key != "vocab_size" or not name.startswith("ViT")}
    model = cls(cls.config_class(**known))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model
