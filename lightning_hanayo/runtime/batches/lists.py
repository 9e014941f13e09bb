"""Whether a list of tensors or containers holds columns, one row per sample each, or samples.

[x [8, 16], y [8]]   columns      [[2, 16], [5, 16], [3, 16]]   samples of different lengths
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hanayo.runtime.batches.containers import Array, children, holds_arrays, leaves
from lightning_hanayo.runtime.batches.plan import WHOLE, Cut, Inside
from lightning_hanayo.runtime.batches.refusal import SPLIT_BATCH


@dataclass(frozen=True)
class ListShape:
    """The length of a list, the rows of the first tensor in it, and whether it is a list and not a tuple."""

    length: int
    rows: int
    is_list: bool


def is_list(value: Any) -> bool:
    """A list or a tuple, but no named tuple."""
    return isinstance(value, (list, tuple)) and children(value) is not None and not hasattr(value, "_fields")


def are_columns(items: Sequence[Any], cut: Cut) -> bool:
    """Whether items that can be cut look like columns.

    All in them is cut. Containers hold a tensor of several dimensions and no single number, as samples do.
    """
    if not _cuts_all(cut):
        return False
    return all(isinstance(item, Array) or not _looks_like_a_sample(item) for item in items)


def _cuts_all(cut: Cut) -> bool:
    return all(map(_cuts_all, cut.cuts.values())) if isinstance(cut, Inside) else cut != WHOLE


def _looks_like_a_sample(item: Any) -> bool:
    """Whether a container has a single number, or tensors of one dimension only."""
    inside = list(_leaves_near_arrays(item))
    has_numbers = any(not leaf.ndim if isinstance(leaf, Array) else leaf is not None for leaf in inside)
    return has_numbers or all(leaf.ndim < 2 for leaf in inside if isinstance(leaf, Array))


def _leaves_near_arrays(value: Any) -> Iterator[Any]:
    """The values in containers with tensors: a list of names is none of them."""
    items = children(value)
    if items is None:
        yield value
    elif holds_arrays(value):
        for item in items.values():
            yield from _leaves_near_arrays(item)


def are_alike(items: Sequence[Any]) -> bool:
    """Whether they may be samples: of one type, and tensors with the same number of dimensions and dtype."""
    kinds = {(type(item), item.ndim, item.dtype) if isinstance(item, Array) else type(item) for item in items}
    return len(kinds - {type(None)}) <= 1


def is_ragged(items: Sequence[Any]) -> bool:
    """Whether the tensors in the items differ in their rows, so that they can't be columns."""
    return len(set(_rows(items))) > 1


def shape_of(items: Sequence[Any]) -> ListShape:
    """Describes a list for the warning."""
    return ListShape(len(items), next(iter(_rows(items)), 0), isinstance(items, list))


def warn_of_doubt(path: str, shape: ListShape) -> None:
    """Tuples of a few columns are usual: a collate_fn returns `(x, y)`. Lists are more often lists of samples."""
    if shape.is_list or shape.length >= shape.rows:
        warnings.warn(
            f"{path} is a list of {shape.length} items with {shape.rows} rows each, which may be columns or samples; "
            f"they are cut as columns. If they are samples, use {SPLIT_BATCH}.",
            stacklevel=2,
        )


def _rows(items: Sequence[Any]) -> list[int]:
    return [leaf.shape[0] for leaf in leaves(items) if isinstance(leaf, Array) and leaf.ndim]
