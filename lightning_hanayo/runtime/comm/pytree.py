"""The tree: what may cross a stage border, taken apart into a hashable skeleton and its tensors.

A tree is a tensor, a plain Python value, a hole, or a tuple, list or dict of trees. A tensor met twice is listed once,
so a mask that every block gets travels once.

    (h, {"mask": m, "causal": True}, m)  ->  skeleton ("tuple", T0, ("dict", ("mask", T1), ("causal", True)), T1)
                                             tensors  [h, m]
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.capture.proxy import Proxy

Skeleton = tuple[Any, ...]
_PLAIN = (type(None), bool, int, float, str)


class Flattener:
    """Takes trees apart into skeletons that share one list of tensors."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def flatten(self, tree: Any, what: str = "value") -> Skeleton:
        """The skeleton of `tree`, whose tensors are added to the list; `what` names it in errors.

        Raises:
            UnsupportedError: something in it is neither tensor nor plain; the message gives its path.
        """
        kind = type(tree)
        if isinstance(tree, Tensor):
            return ("tensor", self._place(tree))
        if kind in _PLAIN:
            return ("plain", kind.__name__, tree)  # the type belongs to the value: True == 1 == 1.0
        if kind is Proxy:
            return ("hole", tree.block, tree.path)
        if kind is tuple or kind is list:
            return (kind.__name__, *(self.flatten(item, f"{what}[{i}]") for i, item in enumerate(tree)))
        if isinstance(tree, dict) and kind.__module__ in ("builtins", "collections"):
            return ("dict", *((self.flatten(k, what), self.flatten(v, f"{what}[{k!r}]")) for k, v in tree.items()))
        if kind is torch.Size:
            return ("size", *tree)
        if kind is torch.dtype:
            return ("dtype", str(tree).removeprefix("torch."))
        raise UnsupportedError(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, which can't cross to the next pipeline stage. "
            f"Tensors, plain Python values, and tuples, lists and dictionaries of them can."
        )

    def _place(self, tensor: Tensor) -> int:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._places[id(tensor)]


def unflatten(skeleton: Skeleton, tensors: Sequence[Tensor], fill: Callable[[Any], Any] = Proxy) -> Any:
    """Put a tree together again; `fill` gives what stands where a hole of a given path was."""
    kind, *parts = skeleton
    match kind:
        case "tensor":
            return tensors[parts[0]]
        case "plain":
            return parts[1]
        case "hole":
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


def places(skeleton: Skeleton) -> list[int]:
    """Where in the list of tensors the tensors of `skeleton` stand, in order of first use."""
    if skeleton[0] == "tensor":
        return [skeleton[1]]
    return list(dict.fromkeys(place for child in _children(skeleton) for place in places(child)))


def renumber(skeleton: Skeleton, where: Mapping[int, int]) -> Skeleton:
    """`skeleton` over another list of tensors: what stood at `i` stands at `where[i]`."""
    kind, *parts = skeleton
    match kind:
        case "tensor":
            return ("tensor", where[parts[0]])
        case "tuple" | "list":
            return (kind, *(renumber(part, where) for part in parts))
        case "dict":
            return ("dict", *((renumber(key, where), renumber(value, where)) for key, value in parts))
        case _:
            return skeleton


def _children(skeleton: Skeleton) -> Sequence[Skeleton]:
    kind, *parts = skeleton
    if kind in ("tuple", "list"):
        return parts
    return [node for pair in parts for node in pair] if kind == "dict" else []
