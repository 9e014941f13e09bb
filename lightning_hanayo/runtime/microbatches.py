"""Splits a batch into micro-batches along its first dimension, and merges the results of the steps.

11 samples, 4 micro-batches  ->  3, 3, 3, 2          2 samples, 4 micro-batches  ->  1, 1
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.runtime.comm.codec import stable_hash


def num_samples(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor in `batch`.

    Raises:
        HanayoError: there is no tensor in it with a first dimension.
    """
    size = next((leaf.shape[0] for leaf in _leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
    if size is None:
        raise HanayoError(f"a batch of type {type(batch).__name__} has no tensor to cut into micro-batches")
    return size


def sizes(samples: int, microbatches: int) -> list[int]:
    """Return the sizes of the micro-batches: they differ by at most one, larger ones first, none is empty."""
    count = max(1, min(samples, microbatches))
    return [samples // count + (i < samples % count) for i in range(count)]


def split(batch: Any, parts: Sequence[int]) -> list[Any]:
    """Cut `batch` into micro-batches of `parts` samples.

    Tensors, and lists and tuples of plain values, are cut if they are as long as the batch. Everything else is shared.
    If there is one micro-batch, it is the batch itself.
    """
    if len(parts) == 1:
        return [batch]
    ends = zip(accumulate(parts), parts, strict=True)
    return [_cut(batch, slice(end - size, end), sum(parts)) for end, size in ends]


def select_samples(batch: Any, indices: Sequence[int], samples: int) -> Any:
    """Return the samples at `indices` of a batch of `samples`: a view of it if they are consecutive."""
    run = range(indices[0], indices[0] + len(indices))
    return _cut(batch, slice(run.start, run.stop) if list(run) == list(indices) else list(indices), samples)


def signature(batch: Any, parts: Sequence[int], kind: str) -> int:
    """Return a number that is equal for batches of the same shapes, cut the same way for the same kind of step."""
    shapes = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in _leaves(batch) if isinstance(leaf, Tensor)]
    return stable_hash(repr((kind, tuple(parts), shapes)))


def merge(results: Sequence[Any], parts: Sequence[int], weights: Sequence[float], *, has_loss: bool = False) -> Any:
    """Merge what a step returned for each micro-batch into one result.

    Tensors, arrays and lists as long as their micro-batch are concatenated. Scalars are averaged with `weights`, which
    sum to 1. Containers keep their type. A single result is returned as it is. `parts` are the micro-batches' sizes.

    Results of a training step have a loss (a tensor, or the mapping's "loss"). It is averaged if it has one element; a
    loss of shape [1] would look like the result of one sample.
    """
    first = results[0]
    if len(results) == 1:
        return first
    if isinstance(first, Tensor):
        if has_loss and all(result.numel() == 1 for result in results):
            return _mean(results, weights)
        if _are_samples(results, parts):
            return torch.cat(list(results))
        return _mean(results, weights) if first.ndim == 0 and first.is_floating_point() else first
    if isinstance(first, np.ndarray):
        return np.concatenate(results) if _are_samples(results, parts) else first
    if isinstance(first, float):
        return sum(r * w for r, w in zip(results, weights, strict=True))
    if isinstance(first, list) and _lists_samples(results, parts):
        return [item for result in results for item in result]
    if isinstance(first, Mapping):
        merged = {
            key: merge([result[key] for result in results], parts, weights, has_loss=has_loss and key == "loss")
            for key in first
        }
        return with_values(first, merged)
    if names := _field_names(first):
        return replace(first, **{n: merge([getattr(r, n) for r in results], parts, weights) for n in names})
    if isinstance(first, (tuple, list)):
        items = [merge(list(row), parts, weights) for row in zip(*results, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first


def with_values(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with other `values`; `mapping` itself does not change.

    Subclasses of dict (a defaultdict, an output of transformers) are copied with all their attributes, and the values
    are set one by one. Other types are constructed from a dictionary, as Lightning does when it moves a batch.

    Raises:
        HanayoError: neither works for this type.
    """
    cls = type(mapping)
    if cls is dict:
        return values
    # If the items are the attributes, a copy would keep the old values as attributes.
    copies_first = isinstance(mapping, dict) and getattr(mapping, "__dict__", None) is not mapping
    cause: Exception | None = None
    for make in (_copied, _constructed) if copies_first else (_constructed, _copied):
        try:
            return make(mapping, values)
        except Exception as error:  # any error in the user's class: the other way may work
            cause = error
    raise HanayoError(
        f"a {cls.__module__}.{cls.__qualname__} can't be made with other values, which each micro-batch needs. "
        f"Let its __init__ take a dictionary, or give it __copy__ and __setitem__."
    ) from cause


def _copied(mapping: Any, values: dict[Any, Any]) -> Any:
    if not isinstance(mapping, dict) and not hasattr(type(mapping), "__copy__"):
        raise TypeError("a copy might share its values with the original")
    other = copy(mapping)
    for key, value in values.items():
        other[key] = value
    return other


def _constructed(mapping: Any, values: dict[Any, Any]) -> Any:
    if is_dataclass(mapping) and not isinstance(mapping, type):
        return replace(mapping, **values)
    made = type(mapping)(values)
    if made.keys() != values.keys():
        raise TypeError("__init__ does not take the items")
    return made


def _mean(results: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean. A micro-batch with weight 0 does not count, even if its value is NaN."""
    weighted = [result * weight for result, weight in zip(results, weights, strict=True) if weight]
    return torch.stack(weighted).sum(0) if weighted else results[0]


def _are_samples(arrays: Sequence[Any], parts: Sequence[int]) -> bool:
    return all(array.ndim and array.shape[0] == size for array, size in zip(arrays, parts, strict=True))


def _lists_samples(results: Sequence[Any], parts: Sequence[int]) -> bool:
    """Whether the lists hold one item for each sample, and not several tensors of all samples."""
    if any(not isinstance(r, list) or len(r) != size for r, size in zip(results, parts, strict=True)):
        return False
    return any(
        not (isinstance(item, Tensor) and item.ndim and item.shape[0] == size)
        for result, size in zip(results, parts, strict=True)
        for item in result
    )


def _field_names(value: Any) -> list[str]:
    """The names of the fields of a dataclass's instance; none for other objects."""
    return [field.name for field in fields(value)] if is_dataclass(value) and not isinstance(value, type) else []


def _leaves(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        children: Any = batch.values()
    elif isinstance(batch, (list, tuple)):
        children = batch
    elif names := _field_names(batch):
        children = [getattr(batch, name) for name in names]
    else:
        yield batch
        return
    for child in children:
        yield from _leaves(child)


def _cut(batch: Any, indices: slice | list[int], samples: int) -> Any:
    def cut(item: Any) -> Any:
        return _cut(item, indices, samples)

    if isinstance(batch, Tensor):
        return batch[indices] if batch.ndim and batch.shape[0] == samples else batch
    if isinstance(batch, Mapping):
        return with_values(batch, {key: cut(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(cut, batch))
    if isinstance(batch, (list, tuple)):
        if len(batch) != samples or any(isinstance(leaf, Tensor) for leaf in _leaves(batch)):
            return type(batch)(map(cut, batch))
        return type(batch)(batch[indices] if isinstance(indices, slice) else [batch[i] for i in indices])
    if names := _field_names(batch):
        return replace(batch, **{name: cut(getattr(batch, name)) for name in names})
    return batch
