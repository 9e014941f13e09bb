"""Looks into the containers of batches and results, and makes others of the same type with other values.

A container is a mapping, a dataclass, a `SimpleNamespace`, a named tuple, a tuple or a list. What a class of mappings
or lists stores besides the items (`encoding._encodings`) counts as content, too.

Other classes, and mappings, may define slices of samples themselves: a `TensorDict`, a data frame, a `UserList`.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_hanayo.errors import HanayoError

Array = Tensor | np.ndarray
"""What has a shape, and can be cut."""


@dataclass(frozen=True)
class Attribute:
    """The key of what a mapping, a list or a tuple stores as an attribute."""

    name: str


def children(value: Any) -> dict[Any, Any] | None:
    """The items of a container by key, field name or index, and its attributes; None for any other value."""
    if isinstance(value, Mapping):
        return _with_attributes(value, dict(value))
    if isinstance(value, (torch.Size, PackedSequence)):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return _with_attributes(value, dict(enumerate(value)))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return dict(vars(value)) if isinstance(value, SimpleNamespace) else None


def _with_attributes(value: Any, items: dict[Any, Any]) -> dict[Any, Any]:
    """The items and the attributes, but for the one that stores the items, and those that repeat one."""
    attributes = getattr(value, "__dict__", None)
    if not attributes or attributes is value:
        return items
    return items | {
        Attribute(name): item
        for name, item in attributes.items()
        if name not in items and not (isinstance(item, Mapping) and item.keys() == items.keys())
    }


def with_children(value: Any, new: dict[Any, Any]) -> Any:
    """Return a container of the same type with other items; `value` itself does not change.

    Raises:
        HanayoError: that is impossible for this type.
    """
    items = {key: item for key, item in new.items() if not isinstance(key, Attribute)}
    if type(value) is SimpleNamespace:
        return SimpleNamespace(**new)
    if isinstance(value, Mapping):
        made = with_values(value, items)
    elif isinstance(value, tuple):
        make: Any = getattr(type(value), "_make", type(value))  # of a named tuple, or of another one
        made = make(items.values())
    elif isinstance(value, list):
        made = [] if type(value) is list else copy(value)
        made[:] = items.values()
    else:
        return _with_fields(value, new)
    for key in new.keys() - items.keys():
        if new[key] is not vars(value)[key.name] or not hasattr(made, key.name):
            setattr(made, key.name, new[key])
    return made


def with_values(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with other `values`; `mapping` itself does not change.

    It is copied with all its attributes, and the values are set one by one: subclasses of dict (a defaultdict, an
    output of transformers), and classes with `__copy__`, such as a `UserDict`. Other types are constructed from a
    dictionary, if nothing but the items is lost by that.

    Raises:
        HanayoError: neither works for this type.
    """
    cls = type(mapping)
    if cls is dict:
        return values
    # If the items are the attributes, a copy would keep the old values as attributes. Others might share their values.
    copies = (isinstance(mapping, dict) or hasattr(cls, "__copy__")) and getattr(mapping, "__dict__", 0) is not mapping
    cause: Exception | None = None
    for make in (_copied, _constructed) if copies else (_constructed,):
        try:
            return make(mapping, values)
        except Exception as error:  # any error in the user's class: the other way may work
            cause = error
    raise HanayoError(
        f"a {cls.__module__}.{cls.__qualname__} can't be made with other values, which each micro-batch needs. Let its "
        f"__init__ take a dictionary and need no more, or give it __copy__ and __setitem__, or a __getitem__ that "
        f"takes slices of samples, or set HanayoStrategy(split_batch=lambda batch, n: ...), a function that returns at "
        f"most n micro-batches."
    ) from cause


def own_rows(value: Any, dim: int) -> int | None:
    """How many samples a value has along `dim` by slices that its class defines; None if it defines none of samples.

    Such a slice has the same type, and as many rows as it should: by all tensors in it, or by its length.
    """
    if not _has_own_slices(value):
        return None
    try:
        first = rows(value, dim, range(1))
        for lengths in (_rows_inside, _length):
            whole = lengths(value, dim)
            if type(first) is type(value) and len(whole) == 1 and lengths(first, dim) == {1}:
                return whole.pop()
    except Exception:  # any error in the user's class
        return None
    return None


def _has_own_slices(value: Any) -> bool:
    """Whether the class of a value may define slices."""
    if isinstance(value, (Array, str, bytes, torch.Size)) or hasattr(type(value), "__missing__"):
        return False
    return getattr(type(value), "__getitem__", None) not in (
        dict.__getitem__,
        list.__getitem__,
        tuple.__getitem__,
        None,
    )


def rows(value: Any, dim: int, indices: Sequence[int]) -> Any:
    """Some rows of what can be indexed: a view of a tensor if `indices` is a range."""
    wanted = slice(indices.start, indices.stop) if isinstance(indices, range) else list(indices)
    return value[(slice(None),) * dim + (wanted,)] if dim else value[wanted]


def _length(value: Any, dim: int) -> set[int]:
    return {len(value)} if dim == 0 else set()


def _rows_inside(value: Any, dim: int) -> set[int]:
    return {leaf.shape[dim] if leaf.ndim > dim else 0 for leaf in leaves(value) if isinstance(leaf, Array)}


def uncoupled(value: Any) -> Any:
    """Let the tensors in new rows count changes in place for themselves; they share memory with the batch.

    Autograd takes each change of a view for one of all views with the same count, whichever rows they have.
    """
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.data
    if type(value) in (dict, list, tuple):
        return with_children(value, {key: uncoupled(item) for key, item in (children(value) or {}).items()})
    if _has_own_slices(value):
        for content in (getattr(value, "__dict__", {}), value if isinstance(value, dict) else {}):
            for key, item in list(content.items()):
                content[key] = uncoupled(item)
    return value


def leaves(tree: Any) -> Iterator[Any]:
    """All values in containers, in their order."""
    inside = children(tree)
    if inside is None:
        yield tree
        return
    for child in inside.values():
        yield from leaves(child)


def holds_arrays(tree: Any) -> bool:
    """Whether there is a tensor or an array in the containers."""
    return any(isinstance(leaf, Array) for leaf in leaves(tree))


def _with_fields(value: Any, new: dict[str, Any]) -> Any:
    """A dataclass's instance with other fields, or another object with other attributes.

    `replace` runs `__post_init__`, which computes what depends on the fields; then all fields that differ are set, for
    it may have changed them once more. Where a field can't be given (an `InitVar`), the instance is copied.
    """
    changed = {name: item for name, item in new.items() if item is not getattr(value, name)}
    try:
        made = replace(value, **{field.name: new[field.name] for field in fields(value) if field.init})
    except Exception:  # any error in the user's class
        made = copy(value)
    for name, item in changed.items():
        object.__setattr__(made, name, item)  # the dataclass may be frozen
    return made


def _copied(mapping: Any, values: dict[Any, Any]) -> Any:
    other = copy(mapping)
    for key, value in values.items():
        other[key] = value
    return other


def _constructed(mapping: Any, values: dict[Any, Any]) -> Any:
    if is_dataclass(mapping) and not isinstance(mapping, type):
        return replace(mapping, **values)
    made = type(mapping)(values)
    if made.keys() != values.keys() or not _hold_the_same(type(mapping)(dict(mapping)), mapping):
        raise TypeError("__init__ does not take all that it stores")
    return made


def _hold_the_same(one: Any, other: Any) -> bool:
    """Whether two values have the same items and attributes; of tensors, the same shapes."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Array):
        return bool(one.shape == other.shape)
    inside, others = ((children(value) or {}) | getattr(value, "__dict__", {}) for value in (one, other))
    if inside.keys() != others.keys() or not all(_hold_the_same(item, others[key]) for key, item in inside.items()):
        return False
    return bool(inside) or one.__eq__(other) is not False  # NotImplemented: objects without values to compare
