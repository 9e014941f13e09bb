"""Images of all samples in one tensor of patches, and videos likewise, as processors of Qwen2-VL and others make them.

input_ids         [2, 9]    . . I I I I . I I   . I I I I . . . .    6 image tokens in sample 0, 4 in sample 1
image_grid_thw    [3, 3]    4 x 4 and 2 x 4     4 x 4                so sample 0 has two images, sample 1 has one
pixel_values      [40, h]   rows 0 to 23        rows 24 to 39

An image has as many tokens as patches, divided by one number (4 here): where a sample's tokens end, an image must end.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.plan import Array, BatchRule, Ragged, children


class _Kind(NamedTuple):
    """Keys and tokens of images, or of videos, in the batches of processors."""

    name: str
    patches: str
    """the patches [patches, ...]"""
    shapes: str
    """the numbers of patches in time, height and width [images, 3]"""
    others: tuple[str, ...]
    """values with an entry for each image"""
    token_type: int
    """of its tokens in `mm_token_type_ids`"""
    token_id: str
    """of its tokens in `input_ids`: the name in a model's config"""


_KINDS = (
    _Kind("image", "pixel_values", "image_grid_thw", ("image_merge_sizes",), 1, "image_token_id"),
    _Kind(
        "video",
        "pixel_values_videos",
        "video_grid_thw",
        ("video_merge_sizes", "second_per_grid_ts", "video_second_per_grid"),
        2,
        "video_token_id",
    ),
)


def patch_cuts(batch: Any, rule: BatchRule, module: nn.Module | None) -> dict[int, Ragged]:
    """Return how patches, and the other values with rows for images, are cut, by their ids.

    Args:
        batch: in which containers hold patches and tokens [batch, seq] by their usual keys.
        rule: how it is cut.
        module: whose configs name the tokens of batches without `mm_token_type_ids`.

    Raises:
        UnsupportedError: the tokens of images aren't known, or those of a sample aren't those of whole images.
    """
    items = {} if isinstance(batch, list) else children(batch) or {}  # a list's items may be samples
    found: dict[int, Ragged] = {}
    for key, item in items.items():
        if not rule.keeps_whole(key):
            found |= patch_cuts(item, rule, module)
    for kind in _KINDS:
        patches, shapes = items.get(kind.patches), items.get(kind.shapes)
        if rule.keeps_whole(kind.patches) or not isinstance(patches, Array) or not isinstance(shapes, Array):
            continue
        if shapes.ndim != 2 or shapes.shape[1] != 3:
            continue
        sizes = torch.as_tensor(shapes).prod(1).tolist()
        if sum(sizes) != len(patches):
            continue  # each image has the patches of the largest one
        ends = _image_ends(sizes, _token_counts(items, kind, rule, module), kind)
        found[id(patches)] = Ragged(tuple([0, *accumulate(sizes)][end] for end in ends))
        for key in (kind.shapes, *kind.others):
            if isinstance(items.get(key), Array | list) and len(items[key]) == len(sizes):
                found[id(items[key])] = Ragged(ends)
    return found


def _token_counts(items: Mapping[Any, Any], kind: _Kind, rule: BatchRule, module: nn.Module | None) -> list[int]:
    """The number of tokens of this kind in each sample."""
    types, ids = items.get("mm_token_type_ids"), items.get("input_ids")
    tokens: Any = types
    wanted: set[Any] = {kind.token_type}
    if not isinstance(types, Array):
        configs = (getattr(part, "config", None) for part in (() if module is None else module.modules()))
        named = (getattr(config, kind.token_id, None) for config in configs)
        tokens, wanted = ids, {token for token in named if isinstance(token, int)}
    if not isinstance(tokens, Array) or len(wanted) != 1:
        missing = f"no model's config has {kind.token_id}" if isinstance(ids, Array) else "no input_ids"
        raise UnsupportedError(
            f"{kind.patches} has the patches of all samples' {kind.name}s, and it isn't known whose they are: the "
            f"batch has no mm_token_type_ids, and {missing}. Add mm_token_type_ids [batch, seq] (0: text, 1: image, "
            "2: video), or use HanayoStrategy(split_batch=...)."
        )
    is_token = torch.as_tensor(tokens) == wanted.pop()
    dim = rule.sample_dim(is_token.ndim)
    counts: list[int] = is_token.movedim(dim, 0).reshape(is_token.shape[dim], -1).sum(1).tolist()
    return counts


def _image_ends(sizes: list[int], tokens: list[int], kind: _Kind) -> tuple[int, ...]:
    """For each sample, how many images it and those before it have.

    Args:
        sizes: of each image, in patches.
        tokens: the number of each sample's image tokens.
        kind: for messages.
    """
    num_patches, num_tokens = sum(sizes), sum(tokens)
    number_at = {patches * num_tokens: number for number, patches in enumerate((0, *accumulate(sizes)))}
    ends = [number_at.get(count * num_patches, -1) for count in accumulate(tokens)]
    if not num_tokens or -1 in ends:
        where = f"those of sample {ends.index(-1)} end inside one" if num_tokens else "there are none"
        raise UnsupportedError(
            f"{kind.patches} has the {num_patches} patches of {len(sizes)} {kind.name}s, and the samples' "
            f"{num_tokens} {kind.name} tokens ({', '.join(map(str, tokens))}) aren't those of whole {kind.name}s: "
            f"{where}. Check {kind.shapes} and the tokens, or use HanayoStrategy(split_batch=...)."
        )
    return tuple(ends)
