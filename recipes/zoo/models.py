"""Makes a tiny random model of an architecture, and batches for it: by the names of its configuration's fields.

LlamaConfig()    hidden_size=4096, num_hidden_layers=32, rope_theta=10000.0, ...
tiny             hidden_size=32,   num_hidden_layers=4,  rope_theta=10000.0, ...
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn

BATCH = 4
VOCABULARY = 99
LENGTHS = (12, 8)
IMAGE = 64
Batches = list[dict[str, Tensor]]

MAPPINGS = {
    "causal-lm": ("CAUSAL_LM",),
    "masked": ("MASKED_LM",),
    "encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "image-classification": ("IMAGE_CLASSIFICATION",),
    "image-text": ("IMAGE_TEXT_TO_TEXT",),
    "speech": ("CTC", "SPEECH_SEQ_2_SEQ"),
}
"""of transformers: the zoo's name, and those of the auto classes"""

_SIZES = {
    r".*vocab(_size.*|_base)?|codebook_size": VOCABULARY,
    r".*(num|n)_(kv|key_value|query|linear_(key|value))_?(heads|groups)|.*heads?|.*num_.*_heads|num_query_groups": 2,
    r".*num_.*layers|n_layers?|.*(encoder|decoder)_layers|num_layers_per_stack|num_blocks|depth": 4,
    r".*head_(dim|size)|.*headdim|d_kv|d_head|dim_head|kv_channels|.*_d_head": 16,
    r"(n_|num_|moe_num_|.*num_local_|n_routed_)experts|zero_expert_num": 4,
    r".*(experts_per_tok(en)?|top_?k|moe_k)": 2,
    r"n_groups?|.*expert_groups?|topk_group|num_limited_groups|o_groups|num_groups": 1,
    r"hidden_size(_.*)?|.*_hidden_size|d_model|n_embd|.*embed_dim|embed(ding)?_(dim|size)|emb_dim|dim|lru_width|.*_embd_pdim"
    r"|(in|out)put_embedding_size|projection_dim|width|.*output_dim|.*proj_dim|dim_model_base|conv_dim": 32,
    r".*intermediate_size(_mlp)?|.*ffn_(dim|hidden_size)|d_ff|d_inner|dff|dim_ff|mlp_dim|feed_forward_size": 64,
    r".*(lora_)?rank": 8,
    r".*(state_size|d_state)": 8,
    r".*chunk_(size|length)|block_size|.*window(_size|_len)?|.*local_attention|index_block_size": 8,
    r"max_.*positions?(_embeddings)?|n_positions|n_ctx|max_seq_len|context_length|model_max_length": 128,
    r"image_size": IMAGE,
}
"""the largest value of a field; the first pattern that matches its whole name counts"""
_NAMED_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
_DEPTHS, _WIDTHS, _HEADS = r"depths|layers|num_blocks", r".*(hidden_sizes?|channels|dims?|widths)", r".*heads?"
_OWN: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("architectures.yaml").read_text("utf-8"))
"""what some architectures ask for in addition"""


class Tiny(L.LightningModule):
    """Trains a model on its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: D102
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:  # noqa: D102
        return torch.optim.SGD(self.parameters(), lr=0.05)


def architectures(mapping: str) -> list[tuple[str, str]]:
    """The types and the classes of a mapping's models."""
    from transformers.models.auto import modeling_auto

    pairs = []
    for name in MAPPINGS[mapping]:
        for kind, classes in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").items():
            pairs += [(kind, one) for one in ([classes] if isinstance(classes, str) else classes)]
    return sorted(set(pairs))


def candidates(mapping: str, kind: str, name: str) -> Iterator[tuple[Tiny, Batches]]:
    """Modules with their batches, of which the first one that trains in one process is taken.

    Raises:
        Exception: whatever the library raises while it makes a model.
    """
    import transformers

    cls = getattr(transformers, name)
    tiny = _config(kind, cls)
    tiny._experts_implementation = "eager"  # as grouped products have no fp64
    if getattr(tiny, "decoder_start_token_id", None) is None:
        tiny.decoder_start_token_id = 0
    for length in (LENGTHS, (16, 16), (64, 64)):
        model = cls(tiny)
        for batches in _batches(mapping, model, length):
            yield _module(model), batches


def _module(model: nn.Module) -> Tiny:
    """With noise on all parameters, as those that begin as zeros hide what follows them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return Tiny(model.train())


def _config(kind: str, cls: Any) -> Any:
    from transformers import CONFIG_MAPPING

    of_kind = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else cls.config_class  # noqa: SIM401 - it is lazy
    return _tiny(of_kind if issubclass(of_kind, cls.config_class) else cls.config_class, _OWN.get(kind, {}))


def _tiny(cls: Any, own: dict[str, Any]) -> Any:
    """A configuration of the class with small sizes, and of all configurations in it."""
    from transformers import PreTrainedConfig

    default, sizes, ids = vars(cls()), {}, iter(range(VOCABULARY - 1, 0, -1))
    for field in dataclasses.fields(cls):
        value = default.get(cls.attribute_map.get(field.name, field.name))
        if isinstance(value, PreTrainedConfig):
            sizes[field.name] = _tiny(type(value), own)
        elif re.fullmatch(r".*token_(id|index)", field.name) and isinstance(value, int):
            sizes[field.name] = _NAMED_IDS.get(field.name) or (0 if "pad" in field.name else next(ids))
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in _SIZES.items() if re.fullmatch(pattern, field.name)), value)
            sizes[field.name] = min(value, size)
        elif isinstance(value, list | tuple) and field.default is not None and value:
            sizes[field.name] = _list(field.name, value)
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**sizes | {name: value for name, value in own.items() if name in names})


def _list(name: str, value: Any) -> Any:
    if re.fullmatch(_DEPTHS, name):
        value = [min(one, 4) for one in value]
    elif re.fullmatch(_HEADS, name):
        value = [2 for _ in value]
    elif re.fullmatch(_WIDTHS, name):
        value = [16 * (i + 1) for i, _ in enumerate(value)]
    return value


def _batches(mapping: str, model: nn.Module, lengths: tuple[int, ...]) -> Iterator[Batches]:
    """Batches of several kinds: of the model's main input, with labels."""
    known = inspect.signature(model.forward).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())

    def known_only(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value for key, value in batch.items() if takes_all or key in known}

    features = partial(_features, last=True), partial(_features, last=False)
    makers: dict[str, list[Any]] = {"image-classification": [_images], "speech": [_waves, *features]}
    for maker in makers.get(mapping, [_text]):
        generator = torch.Generator().manual_seed(0)
        yield [known_only(maker(model.config, length, generator)) for length in lengths]


def _text(config: Any, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Sequences of which one ends in padding."""
    ids = torch.randint(3, 60, (BATCH, length), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, -2:], labels[1, -2:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _images(config: Any, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    size = getattr(config, "image_size", IMAGE)
    size = size if isinstance(size, int) else size[0]
    pixels = torch.randn(BATCH, getattr(config, "num_channels", 3), size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (BATCH,), generator=generator)}


def _waves(config: Any, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 320 * length + 400, generator=generator), "labels": _labels(generator)}


def _features(config: Any, length: int, generator: torch.Generator, last: bool) -> dict[str, Tensor]:
    """Frames of features, as the last dimension or before it."""
    names = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins")
    features = next((getattr(config, name) for name in names if hasattr(config, name)), 80)
    frames = 2 * getattr(config, "max_source_positions", 4 * length)
    shape = (BATCH, frames, features) if last else (BATCH, features, frames)
    return {"input_features": torch.randn(shape, generator=generator), "labels": _labels(generator)}


def _labels(generator: torch.Generator) -> Tensor:
    return torch.randint(3, 20, (BATCH, 4), generator=generator)
