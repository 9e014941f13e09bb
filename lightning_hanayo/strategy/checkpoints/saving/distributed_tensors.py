"""Finds tensors deep in a checkpoint that several ranks hold together, such as a callback's average of the weights.

rank 0    {"average": {"blocks.0.weight": a tensor, "blocks.1.weight": without values}}
rank 1    {"average": {"blocks.0.weight": without values, "blocks.1.weight": a tensor}}

Rank 0 writes the document, and has the same keys as all others. It says where in it a value is missing or a part, and
each rank writes what it has there.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_hanayo.checkpoint.format.plain_values import DistributedTensor
from lightning_hanayo.partial_values import PartialParameter, PartialValues
from lightning_hanayo.partition.missing_values import MissingValues

_CONTAINERS = (dict, OrderedDict, list, tuple)


def with_distributed_marked(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """The value, with a `DistributedTensor` in place of each tensor of which this rank has a part or nothing."""
    if isinstance(value, MissingValues | PartialValues | PartialParameter):
        return DistributedTensor(path, value._owner.rank if isinstance(value, MissingValues) else None)
    if type(value) not in _CONTAINERS:
        return value
    marked = {key: with_distributed_marked(one, (*path, key)) for key, one in _items(value)}
    if all(marked[key] is one for key, one in _items(value)):
        return value
    return type(value)(marked if isinstance(value, dict) else marked.values())


def value_at(checkpoint: Any, path: tuple[Any, ...]) -> Tensor | None:
    """What this rank's checkpoint has at a path; None if it is nothing, or no tensor."""
    for key in path:
        try:
            checkpoint = checkpoint[key]
        except (KeyError, IndexError, TypeError):
            return None
    return checkpoint if isinstance(checkpoint, Tensor) else None


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(value.items() if isinstance(value, dict) else enumerate(value))
