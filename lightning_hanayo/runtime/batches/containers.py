"""Looks into the containers of batches and results, and makes others of the same type with other values.

A container is a mapping, a dataclass, a `SimpleNamespace`, a named tuple, a tuple or a list.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_hanayo.errors import HanayoError

Array = Tensor | np.ndarray
"""What has a shape, and can be cut."""


def children(value: Any) -> dict[Any, Any] | None:
    """The items of a container, by key, field name or index; None for any other value."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (torch.Size, PackedSequence)):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return dict(vars(value)) if isinstance(value, SimpleNamespace) else None


def with_children(value: Any, new: dict[Any, Any]) -> Any:
    """Return a container of the same type with other items; `value` itself does not change."""
    if isinstance(value, Mapping):
        return with_values(value, new)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*new.values())
    if isinstance(value, (tuple, list)):
        return type(value)(new.values())
    return SimpleNamespace(**new) if type(value) is SimpleNamespace else _with_fields(value, new)


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
        f"Let its __init__ take a dictionary, or give it __copy__ and __setitem__, or set "
        f"HanayoStrategy(split_batch=lambda batch, n: ...), a function that returns at most n micro-batches."
    ) from cause


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
