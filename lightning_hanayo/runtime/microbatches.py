"""Micro-batches: a batch cut along its first dimension, and the steps' results put together again.

11 samples, 4 micro-batches  ->  3, 3, 3, 2          2 samples, 4 micro-batches  ->  1, 1
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.runtime.codec import stable_hash


def num_samples(batch: Any) -> int:
    """The size of the first dimension of the first tensor in `batch`.

    Raises:
        HanayoError: there is no tensor in it with a first dimension.
    """
    size = next((leaf.shape[0] for leaf in _leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
    if size is None:
        raise HanayoError(f"a batch of type {type(batch).__name__} has no tensor to cut into micro-batches")
    return size


def sizes(samples: int, microbatches: int) -> list[int]:
    """The sizes of the micro-batches: they differ by at most one, larger ones first, none is empty."""
    count = max(1, min(samples, microbatches))
    return [samples // count + (i < samples % count) for i in range(count)]


def split(batch: Any, parts: Sequence[int]) -> list[Any]:
    """Cut `batch` into micro-batches of `parts` samples.

    Tensors, and lists and tuples of plain values, that are as long as the batch are cut; everything else is shared.
    """
    samples = sum(parts)
    starts = [sum(parts[:i]) for i in range(len(parts))]
    return [_cut(batch, start, start + size, samples) for start, size in zip(starts, parts, strict=True)]


def signature(batch: Any, parts: Sequence[int], kind: str) -> int:
    """A number that batches of the same shapes, cut the same way for the same kind of step, share."""
    shapes = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in _leaves(batch) if isinstance(leaf, Tensor)]
    return stable_hash(repr((kind, tuple(parts), shapes)))


def merge(results: Sequence[Any], parts: Sequence[int], weights: Sequence[float]) -> Any:
    """What a step returned for each micro-batch, as one: samples side by side, other numbers as weighted mean.

    Tensors as long as their micro-batch are concatenated, scalars averaged with `weights` (which sum to 1).
    """
    first = results[0]
    if isinstance(first, Tensor):
        if first.ndim and all(r.ndim and r.shape[0] == size for r, size in zip(results, parts, strict=True)):
            return torch.cat(list(results))
        if first.ndim == 0 and first.is_floating_point():
            parts_with_weight = [r * w for r, w in zip(results, weights, strict=True) if w]
            return torch.stack(parts_with_weight).sum() if parts_with_weight else first
        return first
    if isinstance(first, Mapping):
        merged = {key: merge([result[key] for result in results], parts, weights) for key in first}
        return merged if type(first) is dict else type(first)(**merged)
    if type(first) in (tuple, list):
        whole = all(isinstance(r, list) and len(r) == size for r, size in zip(results, parts, strict=True))
        if whole and not any(isinstance(item, Tensor) for item in first):
            return [item for result in results for item in result]
        return type(first)(merge(list(items), parts, weights) for items in zip(*results, strict=True))
    if isinstance(first, float):
        return sum(r * w for r, w in zip(results, weights, strict=True))
    return first


def _leaves(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        children: Any = batch.values()
    elif isinstance(batch, (list, tuple)):
        children = batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        children = [getattr(batch, field.name) for field in fields(batch)]
    else:
        yield batch
        return
    for child in children:
        yield from _leaves(child)


def _cut(batch: Any, start: int, stop: int, samples: int) -> Any:
    def inside(item: Any) -> Any:
        return _cut(item, start, stop, samples)

    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.ndim and batch.shape[0] == samples else batch
    if isinstance(batch, Mapping):
        cut = {key: inside(value) for key, value in batch.items()}
        return cut if type(batch) is dict else type(batch)(cut)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(inside, batch))
    if isinstance(batch, (list, tuple)):
        plain = len(batch) == samples and not any(isinstance(leaf, Tensor) for leaf in _leaves(batch))
        return batch[start:stop] if plain else type(batch)(map(inside, batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{field.name: inside(getattr(batch, field.name)) for field in fields(batch)})
    return batch
