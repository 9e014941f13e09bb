"""Makes tiny random models of architectures: by the names of their configurations' fields.

LlamaConfig()    hidden_size=4096, num_hidden_layers=32, rope_theta=10000.0, ...
tiny             hidden_size=32,   num_hidden_layers=4,  rope_theta=10000.0, ...
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn

from recipes.zoo import inputs
from recipes.zoo.inputs import IMAGE, VOCABULARY, Batches

LENGTHS = ((12, 8), (16, 16), (64, 64))
"""of two batches; the next ones are tried where a model can't take the first"""
_SIZES = {
    r".*vocab(_size.*|_base)?|codebook_size": VOCABULARY,
    r".*(num|n)_(kv|key_value|query|linear_(key|value))_?(heads|groups)|.*heads?|.*num_.*_heads|num_query_groups": 2,
    r".*num_.*layers|n_layers?|.*(encoder|decoder)_layers|num_layers_per_stack|num_(layers|blocks)|depth": 4,
    r".*head_(dim|size)|.*headdim|d_kv|d_head|dim_head|kv_channels|.*_d_head": 16,
    r"(n_|num_|moe_num_|.*num_local_|n_routed_)experts|zero_expert_num": 4,
    r".*(experts_per_tok(en)?|top_?k|moe_k)": 2,
    r"n_groups?|.*expert_groups?|topk_group|num_limited_groups|o_groups|num_groups|norm_num_groups": 1,
    r"hidden_size(_.*)?|.*_hidden_size|d_model|n_embd|.*embed_dim|embed(ding)?_(dim|size)|emb_dim|dim|lru_width|.*_embd_pdim"
    r"|(in|out)put_embedding_size|projection_dim|width|.*output_dim|.*proj_dim|dim_model_base|conv_dim"
    r"|(cross|joint)_attention_dim|text_dim|caption_channels|.*projection_dim|cap_feat_dim|context_in_dim|freq_dim": 32,
    r".*intermediate_(size|dim)(_mlp)?|.*ffn_(dim|hidden_size)|d_ff|d_inner|dff|dim_ff|mlp_dim|feed_forward_size": 64,
    r".*(lora_)?rank": 8,
    r".*(state_size|d_state)": 8,
    r".*chunk_(size|length)|block_size|.*window(_size|_len)?|.*local_attention|index_block_size": 8,
    r"max_.*positions?(_embeddings)?|n_positions|n_ctx|max_seq_len|context_length|model_max_length": 128,
    r"image_size|img_size": IMAGE,
    r"sample_(size|height|width)": 8,
    r"(in|out|latent)_channels": 4,
}
"""the largest value of a field; the first pattern that matches its whole name counts"""
_NAMED_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
_DEPTHS, _WIDTHS, _HEADS = r"depths|layers|num_blocks", r".*(hidden_sizes?|channels|dims?|widths)", r".*heads?"
_ROTARY = [2, 3, 3]
"""of half a head's width, the parts that time, height and width turn"""
_OWN: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("architectures.yaml").read_text("utf-8"))
"""what some architectures ask for in addition: library -> architecture -> field -> value"""
Candidates = Iterator[tuple["Tiny", Batches]]


class Tiny(L.LightningModule):
    """Trains a model on its own loss, or on one of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.blocks: Any = None
        """the strategy's option"""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: D102
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:  # noqa: D102
        return torch.optim.SGD(self.parameters(), lr=0.05)


class _Classifier(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["images"])
        return nn.functional.cross_entropy(logits, batch["labels"])


class _Denoiser(Tiny):
    def __init__(self, model: nn.Module, fixed: dict[str, Any]) -> None:
        super().__init__(model)
        self.fixed = fixed
        """arguments that aren't of the batch"""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        fixed = {key: self._made(value) for key, value in self.fixed.items()}
        output = self.model(**batch, **fixed, return_dict=False)
        return (output if isinstance(output, Tensor) else output[0]).square().mean()

    def _made(self, value: Any) -> Any:
        if not isinstance(value, list) or isinstance(value[0], list):
            return value
        return torch.arange(prod(value), device=self.device).reshape(value)


class Mapping(NamedTuple):
    """Architectures of one kind."""

    library: str
    names: Callable[[], list[tuple[str, str]]]
    """their types and classes"""
    candidates: Callable[[str, str], Candidates]
    """Modules with their batches, of which the first one that trains in one process is taken."""


def of_transformers(
    makers: tuple[inputs.Maker, ...], *auto_classes: str, lengths: tuple[tuple[int, int], ...] = LENGTHS
) -> Mapping:
    """The models of auto classes such as "CAUSAL_LM", with batches of the first maker whose batches they take."""

    def names() -> list[tuple[str, str]]:
        from transformers.models.auto import modeling_auto

        pairs = set()
        for name in auto_classes:
            for kind, classes in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").items():
                pairs |= {(kind, one) for one in ([classes] if isinstance(classes, str) else classes)}
        return sorted(pairs)

    def candidates(kind: str, name: str) -> Candidates:
        import transformers

        cls = getattr(transformers, name)
        config = _config(kind, cls)
        config._experts_implementation = "eager"  # as grouped products have no fp64
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0
        for pair in lengths:
            model = cls(config)
            for maker in makers:
                for kinds in zip(*(maker(model, length) for length in pair), strict=True):
                    yield Tiny(_noisy(model)), list(kinds)

    return Mapping("transformers", names, candidates)


def _timm_names() -> list[tuple[str, str]]:
    return [(family, own["model"]) for family, own in sorted(_OWN["timm"].items())]


def _timm(family: str, name: str) -> Candidates:
    timm: Any = import_module("timm")
    own = _OWN["timm"][family]
    options = {key: value for key, value in own.items() if key not in ("model", "class", "size", "blocks")}
    make = partial(timm.create_model, name)
    if "class" in own:  # as the model's function fixes its sizes
        make = getattr(import_module(f"timm.models.{family}"), own["class"])
    for size in (own.get("size", IMAGE), 2 * IMAGE, None):
        try:
            model = make(num_classes=5, img_size=size, **options)
        except Exception:  # it takes images of all sizes, or none of this one
            model = make(num_classes=5, **options)
        module = _Classifier(_noisy(model, 0.01))
        if "blocks" in own:
            module.blocks = [f"model.{one}" for one in own["blocks"]]
        yield module, inputs.pictures(size or model.default_cfg["input_size"][-1])


def _diffusers_names() -> list[tuple[str, str]]:
    diffusers = import_module("diffusers")
    return [
        (name.partition("Transformer")[0] or name, name)
        for name in sorted(_OWN["diffusers"])
        if hasattr(diffusers, name)
    ]


def _diffusers(kind: str, name: str) -> Candidates:
    diffusers: Any = import_module("diffusers")
    cls, own = getattr(diffusers, name), dict(_OWN["diffusers"][name])
    shapes, fixed = own.pop("inputs"), own.pop("fixed", {})
    default = {key: one.default for key, one in inspect.signature(cls.__init__).parameters.items()}
    model = cls(**{key: _size(key, value) for key, value in default.items() if _is_size(value)} | own)
    yield _Denoiser(_noisy(model), fixed), inputs.tensors(shapes)


MAPPINGS = {
    "causal-lm": of_transformers((inputs.text,), "CAUSAL_LM"),
    "masked": of_transformers((inputs.text,), "MASKED_LM"),
    "encoder-decoder": of_transformers((inputs.text,), "SEQ_TO_SEQ_CAUSAL_LM"),
    "image-classification": of_transformers((inputs.images,), "IMAGE_CLASSIFICATION"),
    "image-text": of_transformers((inputs.text,), "IMAGE_TEXT_TO_TEXT"),
    "image-text-images": of_transformers((inputs.images_and_text,), "IMAGE_TEXT_TO_TEXT", lengths=LENGTHS[:1]),
    "speech": of_transformers((inputs.waves, inputs.features), "CTC", "SPEECH_SEQ_2_SEQ"),
    "timm": Mapping("timm", _timm_names, _timm),
    "diffusers": Mapping("diffusers", _diffusers_names, _diffusers),
}


def _noisy(model: nn.Module, scale: float = 0.05) -> nn.Module:
    """With noise on all parameters, as those that begin as zeros hide what follows them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model.train()


def _config(kind: str, cls: Any) -> Any:
    from transformers import CONFIG_MAPPING

    of_kind = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else cls.config_class  # noqa: SIM401 - it is lazy
    of_model = of_kind if issubclass(of_kind, cls.config_class) else cls.config_class
    own = _OWN["transformers"].get(kind, {})
    config = _tiny(of_model, own)
    for name, value in own.items():
        if not hasattr(config, name):
            setattr(config, name, value)  # which the model reads, and the class lacks
    return config


def _tiny(cls: Any, own: dict[str, Any]) -> Any:
    """A configuration of the class with small sizes, and of all configurations in it."""
    from transformers import PreTrainedConfig

    default, sizes, ids = vars(cls()), {}, iter(range(VOCABULARY - 1, 0, -1))
    for field in dataclasses.fields(cls):
        value = default.get(cls.attribute_map.get(field.name, field.name))
        if isinstance(value, PreTrainedConfig):
            sizes[field.name] = _tiny(type(value), own)
        elif isinstance(value, dict) and "rope_type" in value and "mrope_section" in value | own:
            sizes[field.name] = value | {"mrope_section": own.get("mrope_section", _ROTARY)}
        elif re.fullmatch(r".*token_(id|index)", field.name) and isinstance(value, int):
            sizes[field.name] = _NAMED_IDS.get(field.name) or (0 if "pad" in field.name else next(ids))
        elif _is_size(value) and (isinstance(value, int) or (field.default is not None and value)):
            sizes[field.name] = _size(field.name, value)
    names = {field.name for field in dataclasses.fields(cls)}
    own = {"layerdrop": 0.0} | own  # at random it leaves out blocks, which an error rejects
    return cls(**sizes | {name: value for name, value in own.items() if name in names})


def _is_size(value: object) -> bool:
    return isinstance(value, int | list | tuple) and not isinstance(value, bool)


def _size(name: str, value: Any) -> Any:
    if isinstance(value, int):
        return min(value, next((size for pattern, size in _SIZES.items() if re.fullmatch(pattern, name)), value))
    if re.fullmatch(_DEPTHS, name):
        return [min(one, 4) for one in value]
    if re.fullmatch(_HEADS, name):
        return [2 for _ in value]
    if re.fullmatch(_WIDTHS, name):
        return [16 * (i + 1) for i, _ in enumerate(value)]
    return value
