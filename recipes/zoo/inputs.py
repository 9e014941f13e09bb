"""Makes batches of random numbers for tiny models: text, images, sound, or both text and images.

A maker yields batches of several kinds. The first kind that a model trains on is taken.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 4
IMAGES = 8
"""of a batch, so that no micro-batch has a single one, of which BatchNorm has no variance"""
VOCABULARY = 99
IMAGE = 64
_TILES = 4
"""of an image, in models that cut it"""
Batch = dict[str, Tensor]
Batches = list[dict[str, Tensor]]
_ENCODERS = ("audio_config", "encoder_config")
Maker = Callable[[nn.Module, int], Iterator[Batch]]
"""yields batches for a model and a length of sequences"""


def text(model: nn.Module, length: int) -> Iterator[Batch]:
    """Sequences of which one ends in padding."""
    ids = _integers(3, 60, BATCH, length)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, -2:], labels[1, -2:] = 0, -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    yield _known(batch, model.forward)
    yield _known(batch | {"mm_token_type_ids": torch.zeros_like(ids)}, model.forward)


def images(model: nn.Module, length: int) -> Iterator[Batch]:
    """Images with classes."""
    config: Any = model.config
    pixels = _normal(IMAGES, getattr(config, "num_channels", 3), *_height_width(config))
    yield _known({"pixel_values": pixels, "labels": _integers(0, 2, IMAGES)}, model.forward)


def waves(model: nn.Module, length: int) -> Iterator[Batch]:
    """Sound with labels."""
    yield _known(
        {"input_values": _normal(BATCH, 320 * length + 400), "labels": _integers(3, 20, BATCH, 4)}, model.forward
    )


def features(model: nn.Module, length: int) -> Iterator[Batch]:
    """Frames of sound's features, as the last dimension and before it, with labels."""
    config: Any = model.config
    encoder = next((one for name in _ENCODERS if (one := getattr(config, name, None)) is not None), config)
    names = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim")
    count = next((getattr(encoder, name) for name in names if hasattr(encoder, name)), 80)
    frames = 2 * getattr(encoder, "max_source_positions", 4 * length)
    for shape in ((frames, count), (count, frames), (frames, getattr(config, "d_model", count))):
        batch = {"input_features": _normal(BATCH, *shape), "labels": _integers(3, 20, BATCH, 4)}
        yield _known(batch, model.forward)
        yield _known(batch | {"attention_mask": torch.ones(BATCH, frames).long()}, model.forward)


def images_and_text(model: nn.Module, length: int) -> Iterator[Batch]:
    """An image for each sequence, whose tokens stand in the sequence if the model's configuration names them."""
    config: Any = model.config
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    for pixels in _pixels(getattr(config, "vision_config", None) or config):
        if pixels.keys() <= inspect.signature(model.forward).parameters.keys():
            yield _with_text(model, pixels, token, length)
            yield pixels | {"labels": _integers(3, 20, BATCH, length)}


def _with_text(model: nn.Module, pixels: Batch, token: int | None, length: int) -> Batch:
    """Images with sequences in which they have tokens, and of which the second one ends in padding."""
    count = 0 if token is None else _tokens_per_image(model, pixels)
    ids = _integers(3, 60, BATCH, length + count)
    ids[:, 2 : 2 + count] = token or 0
    types = torch.zeros_like(ids)
    types[:, 2 : 2 + count] = 1
    mask, labels = torch.ones_like(ids), ids.where(types == 0, -100)
    mask[1, -2:], labels[1, -2:] = 0, -100
    names = inspect.signature(model.forward).parameters
    others = {
        "bbox": torch.rand(*ids.shape, 4, generator=_generator),
        "image_attention_mask": torch.ones(*ids.shape, 1).long(),
        "cross_attention_mask": torch.ones(*ids.shape, 1, _TILES).long(),
        "image_embeds_position_mask": types,
        "qformer_input_ids": ids[:, :8],
    }
    rest = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    rest |= {key: value for key, value in others.items() if key in names}
    return _known(pixels | rest | dict.fromkeys(("mm_token_type_ids", "token_type_ids"), types), model.forward)


def _pixels(config: Any) -> Iterator[Batch]:
    """Images as processors hand them over: patches in one tensor, or pixels with their sizes and masks."""
    height, width = _height_width(config)
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    if isinstance(patch := getattr(config, "patch_size", None), int):
        numbers = channels * patch * patch
        shapes = torch.tensor([[1, 4, 4]] * BATCH)
        for values in {numbers * getattr(config, "temporal_patch_size", 1), numbers, 2 * numbers}:
            yield {"pixel_values": _normal(16 * BATCH, values), "image_grid_thw": shapes}
            merges = torch.full((BATCH,), 2)
            yield {"pixel_values": _normal(16 * BATCH, values), "image_grid_thw": shapes, "image_merge_sizes": merges}
        yield {"pixel_values": _normal(16 * BATCH, channels, patch, patch), "image_grid_thw": shapes}
        yield {
            "pixel_values": _normal(BATCH, 16, numbers),
            "spatial_shapes": shapes[:, 1:],
            "pixel_attention_mask": torch.ones(BATCH, 16).long(),
        }
    one = _normal(BATCH, channels, height, width)
    several = one[:, None].repeat(1, 2, 1, 1, 1)
    sizes = torch.tensor([[height, width]] * BATCH)
    yield {
        "pixel_values": several[:, :1],
        "pixel_attention_mask": torch.ones(BATCH, 1, height, width, dtype=torch.long),
    }
    yield {"pixel_values": several, "image_sizes": sizes}
    yield {
        "pixel_values": one[:, None, None].repeat(1, 1, _TILES, 1, 1, 1),
        "aspect_ratio_ids": torch.ones(BATCH, 1).long(),
        "aspect_ratio_mask": torch.ones(BATCH, 1, _TILES).long(),
    }
    yield {"pixel_values": one, "high_res_pixel_values": one.clone()}
    yield {"pixel_values": one, "image_sizes": sizes}
    yield {"pixel_values": one}
    yield {"pixel_values": several[:, :1]}
    width = getattr(config, "patch_embed_hidden_size", channels * 256) + 2
    yield {"flattened_patches": _normal(BATCH, 16, width).abs().clamp(max=15)}


def _tokens_per_image(model: Any, pixels: Batch) -> int:
    """As many as features that the model makes of an image; 0 if it can't tell."""
    for one in (model, getattr(model, "model", model)):
        try:
            with torch.no_grad():
                found = one.get_image_features(**_known(pixels, one.get_image_features))
            found = getattr(found, "pooler_output", found)
            found = found if isinstance(found, Tensor) else torch.cat([item.flatten(0, -2) for item in found])
            return int(found.numel() // found.shape[-1] // BATCH)
        except Exception:  # whatever the library raises: the training tells
            continue
    names = ("latent_query_num", "num_query_tokens")
    return next((int(getattr(model.config, name)) for name in names if hasattr(model.config, name)), 0)


def pictures(size: int) -> Batches:
    """Two batches of images with classes."""
    return [{"images": _normal(IMAGES, 3, size, size), "labels": _integers(0, 5, IMAGES)} for _ in range(2)]


def tensors(shapes: dict[str, list[Any]]) -> Batches:
    """Two batches of tensors of given shapes after the batch, which may end in "int", "eights", "bool" or "ones"."""
    return [{key: _tensor(shape) for key, shape in shapes.items()} for _ in range(2)]


def _tensor(shape: list[Any]) -> Tensor:
    match shape:
        case [*sizes, "int"]:
            return _integers(0, 2, BATCH, *sizes)
        case [*sizes, "eights"]:
            return torch.full((BATCH, *sizes), 8)
        case [*sizes, "bool"]:
            return _integers(0, 2, BATCH, *sizes).bool()
        case [*sizes, "ones"]:
            return torch.ones(BATCH, *sizes, dtype=torch.long)
    return _normal(BATCH, *shape)


def _height_width(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or IMAGE
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _known(batch: Batch, function: Any) -> Batch:
    """Without what a function doesn't take."""
    known = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
    return {key: value for key, value in batch.items() if takes_all or key in known}


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator)


def _integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=_generator)


_generator = torch.Generator().manual_seed(0)
