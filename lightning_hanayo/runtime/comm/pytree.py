"""Flattens a pytree that is sent between stages into a hashable skeleton and a list of tensors, and puts it together.

A tree is a tensor, a plain Python value, an output reference, or a tuple, list or dict of trees. A tensor that occurs
twice is listed once, so a mask that every block gets is sent once.

    (h, {"mask": m, "causal": True}, m)  ->  skeleton ("tuple", T0, ("dict", ("mask", T1), ("causal", True)), T1)
                                             tensors  [h, m]
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.errors import UnsupportedError

Skeleton = tuple[Any, ...]
_PLAIN = (type(None), bool, int, float, str)


class OutputReference:
    """Refers to the part at `path` of the output of block number `block`, which is not known here."""

    __slots__ = ("block", "path")
    block: int
    path: tuple[Any, ...]

    def __init__(self, path: tuple[Any, ...] = (), block: int = 0) -> None:
        self.path = path
        self.block = block


class Flattener:
    """Flattens trees into skeletons that share one list of tensors."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._indices: dict[int, int] = {}

    def flatten(self, tree: Any, what: str = "value") -> Skeleton:
        """Return the skeleton of `tree`, and add its tensors to the list; `what` names the tree in errors.

        Raises:
            UnsupportedError: a value in it can't be sent; the message gives its path and type.
        """
        kind = type(tree)
        if isinstance(tree, Tensor):
            return ("tensor", self._index(tree))
        if kind in _PLAIN:
            return ("plain", kind.__name__, tree)  # with its type, as True == 1 == 1.0
        if isinstance(tree, OutputReference):
            return ("proxy", tree.block, tree.path)
        if kind is tuple or kind is list:
            return (kind.__name__, *(self.flatten(item, f"{what}[{i}]") for i, item in enumerate(tree)))
        if isinstance(tree, dict) and kind.__module__ in ("builtins", "collections"):
            return ("dict", *((self.flatten(k, what), self.flatten(v, f"{what}[{k!r}]")) for k, v in tree.items()))
        if kind is torch.Size:
            return ("size", *tree)
        if kind is torch.dtype:
            return ("dtype", str(tree).removeprefix("torch."))
        raise UnsupportedError(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, which can't be sent to the next pipeline stage. "
            f"Tensors, plain Python values, and tuples, lists and dictionaries of them can."
        )

    def _index(self, tensor: Tensor) -> int:
        if id(tensor) not in self._indices:
            self._indices[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._indices[id(tensor)]


def unflatten(skeleton: Skeleton, tensors: Sequence[Tensor], fill: Callable[[Any], Any] = OutputReference) -> Any:
    """Put a tree together again. `fill` is called with the path of each output reference and replaces it."""
    kind, *parts = skeleton
    match kind:
        case "tensor":
            return tensors[parts[0]]
        case "plain":
            return parts[1]
        case "proxy":
            return fill(parts[1])
        case "tuple":
            return tuple(unflatten(part, tensors, fill) for part in parts)
        case "list":
            return [unflatten(part, tensors, fill) for part in parts]
        case "dict":
            return {unflatten(key, tensors, fill): unflatten(value, tensors, fill) for key, value in parts}
        case "size":
            return torch.Size(parts)
        case _:
            return getattr(torch, parts[0])


def tensor_indices(skeleton: Skeleton) -> list[int]:
    """The indices of the skeleton's tensors in the list of tensors, in order of first use."""
    kind, *parts = skeleton
    if kind == "tensor":
        return parts
    if kind == "dict":
        parts = [node for pair in parts for node in pair]
    elif kind not in ("tuple", "list"):
        return []
    return list(dict.fromkeys(index for part in parts for index in tensor_indices(part)))


def renumber(skeleton: Skeleton, new_index: Mapping[int, int]) -> Skeleton:
    """The skeleton for another list of tensors, in which tensor `i` has the index `new_index[i]`."""
    kind, *parts = skeleton
    match kind:
        case "tensor":
            return ("tensor", new_index[parts[0]])
        case "tuple" | "list":
            return (kind, *(renumber(part, new_index) for part in parts))
        case "dict":
            return ("dict", *((renumber(key, new_index), renumber(value, new_index)) for key, value in parts))
        case _:
            return skeleton
