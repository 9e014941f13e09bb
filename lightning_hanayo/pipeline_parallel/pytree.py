"""Flattens a pytree that is sent between stages into a hashable skeleton and a list of tensors, and puts it together.

A tree is a tensor, a plain Python value, an output reference, or a tuple, list or dict of trees; among the arguments of
blocks also an object that `objects.py` knows. A tensor that occurs twice is listed once, so a mask that every block
gets is sent once.

    (h, {"mask": m, "causal": True}, m)  ->  skeleton ("tuple", T0, ("dict", ("mask", T1), ("causal", True)), T1)
                                             tensors  [h, m]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import copysign
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.comm.objects import KINDS, kind_of

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
        self._objects: dict[int, tuple[Any, Skeleton | None]] = {}

    def flatten(self, tree: Any, what: str = "value", *, is_argument: bool = False) -> Skeleton:
        """Return the skeleton of `tree`, and add its tensors to the list; `what` names the tree in errors.

        Raises:
            UnsupportedError: a value in it can't be sent; the message gives its path and type.
        """
        kind = type(tree)
        if isinstance(tree, Tensor):
            return ("tensor", self._index(tree)) if _is_strided(tree) else self._object(tree, what)
        if kind in _PLAIN:
            sign = "-" if kind is float and not tree and copysign(1.0, tree) < 0 else ""
            return ("plain", sign + kind.__name__, tree)  # with its type, as True == 1 == 1.0, and 0.0 == -0.0
        if isinstance(tree, OutputReference):
            return ("proxy", tree.block, tree.path)
        if kind is tuple or kind is list:
            parts = [self.flatten(item, f"{what}[{i}]", is_argument=is_argument) for i, item in enumerate(tree)]
            return (kind.__name__, *parts)
        if isinstance(tree, dict) and kind.__module__ in ("builtins", "collections"):
            return ("dict", *(
                (self.flatten(k, what), self.flatten(v, f"{what}[{k!r}]", is_argument=is_argument))
                for k, v in tree.items()
            ))  # fmt: skip
        if kind is torch.Size:
            return ("size", *tree)
        if kind is torch.dtype:
            return ("dtype", str(tree).removeprefix("torch."))
        if is_argument:
            return self._object(tree, what)
        raise _unsendable(tree, what)

    @property
    def nested(self) -> list[Tensor]:
        """The nested tensors that have been flattened."""
        return [value for value, _ in self._objects.values() if isinstance(value, Tensor)]

    def _object(self, value: Any, what: str) -> Skeleton:
        """The skeleton of an object, which is made once: all blocks may get the same mask."""
        if id(value) not in self._objects:
            self._objects[id(value)] = value, None  # until its parts are known, which may refer to it
            kind = kind_of(value)
            tree = None if kind is None else kind.to_tree(value)
            if kind is not None and tree is not None:
                parts = self.flatten(tree, what, is_argument=True)
                self._objects[id(value)] = value, ("object", kind.name, parts)
        skeleton = self._objects[id(value)][1]
        if skeleton is None:
            raise _unsendable(value, what)
        return skeleton

    def _index(self, tensor: Tensor) -> int:
        if id(tensor) not in self._indices:
            self._indices[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._indices[id(tensor)]


def _is_strided(tensor: Tensor) -> bool:
    """Whether its values are one array."""
    is_plain = type(tensor) is Tensor or not is_traceable_wrapper_subclass(tensor)
    return is_plain and tensor.layout is torch.strided and not tensor.is_nested


def _unsendable(value: Any, what: str) -> UnsupportedError:
    kind = type(value)
    if isinstance(value, Tensor):
        shown = (
            f"nested tensor of the layout {value.layout}" if value.is_nested else f"{kind.__name__} ({value.layout})"
        )
        return UnsupportedError(
            f"{what} is a {shown}, which can't be sent to the next pipeline stage. Strided tensors can, and nested "
            f"ones of the layout torch.jagged: torch.nested.nested_tensor(..., layout=torch.jagged)."
        )
    name = f" ({value.__module__}.{value.__qualname__})" if isinstance(value, (type, FunctionType)) else ""
    return UnsupportedError(
        f"{what} is a {kind.__module__}.{kind.__qualname__}{name}, which can't be sent to the next pipeline stage. "
        f"Tensors, plain Python values, and tuples, lists and dictionaries of them can; as arguments of blocks also "
        f"jagged nested tensors, BlockMasks, classes, and functions that refer to such values alone. A class or "
        f"function must be found by its name in sys.modules, where importlib doesn't put a module by itself."
    )


def unflatten(skeleton: Skeleton, tensors: Sequence[Tensor], fill: Callable[..., Any] = OutputReference) -> Any:
    """Put a tree together again. `fill` is called with path and block of each output reference, and replaces it."""
    kind, *parts = skeleton
    match kind:
        case "tensor":
            return tensors[parts[0]]
        case "plain":
            return parts[1]
        case "proxy":
            return fill(parts[1], parts[0])
        case "tuple":
            return tuple([unflatten(part, tensors, fill) for part in parts])
        case "list":
            return [unflatten(part, tensors, fill) for part in parts]
        case "dict":
            return {unflatten(key, tensors, fill): unflatten(value, tensors, fill) for key, value in parts}
        case "size":
            return torch.Size(parts)
        case "object":
            return KINDS[parts[0]].from_tree(unflatten(parts[1], tensors, fill))
        case _:
            return getattr(torch, parts[0])


VALUE: Skeleton = ("value",)
NONE: Skeleton = ("plain", "NoneType", None)


def structure_of(tree: Any) -> Skeleton:
    """The containers of `tree`, and where it holds None: all that code sees which gets proxies for its values."""
    if type(tree) in (tuple, list):
        return (type(tree).__name__, *[structure_of(item) for item in tree])
    if isinstance(tree, dict):
        return ("dict", *[(key, structure_of(item)) for key, item in tree.items()])
    return NONE if tree is None else VALUE


def hidden_part(structure: Skeleton, tree: Any, what: str) -> str:
    """Where `tree` has a value that `structure` hasn't, so that nobody would look for it there; "" if nowhere."""
    kind, *parts = structure
    if kind == "value":
        return ""
    if tree is None or structure == NONE:
        return "" if tree is None else what
    if kind == "dict" and isinstance(tree, dict):
        known = dict(parts)
        found = (hidden_part(known.get(key, NONE), item, f"{what}[{key!r}]") for key, item in tree.items())
    elif kind != "dict" and isinstance(tree, (tuple, list)):
        known = dict(enumerate(parts))
        found = (hidden_part(known.get(i, NONE), item, f"{what}[{i}]") for i, item in enumerate(tree))
    else:
        return what
    return next(filter(None, found), "")


def nodes(skeleton: Skeleton) -> Iterator[Skeleton]:
    """All nodes of a skeleton, from the root on."""
    yield skeleton
    kind, *parts = skeleton
    if kind == "dict":
        parts = [node for pair in parts for node in pair]
    elif kind == "object":
        parts = parts[1:]
    elif kind not in ("tuple", "list"):
        return
    for part in parts:
        yield from nodes(part)


def map_leaves(skeleton: Skeleton, change: Callable[[Skeleton], Skeleton]) -> Skeleton:
    """The skeleton with `change` applied to each tensor and each output reference."""
    kind, *parts = skeleton
    match kind:
        case "tensor" | "proxy":
            return change(skeleton)
        case "tuple" | "list":
            return (kind, *(map_leaves(part, change) for part in parts))
        case "object":
            return (kind, parts[0], map_leaves(parts[1], change))
        case "dict":
            return ("dict", *((map_leaves(key, change), map_leaves(value, change)) for key, value in parts))
        case _:
            return skeleton


def tensor_indices(skeleton: Skeleton) -> list[int]:
    """The indices of the skeleton's tensors in the list of tensors, in order of first use."""
    return list(dict.fromkeys(node[1] for node in nodes(skeleton) if node[0] == "tensor"))


def renumber(skeleton: Skeleton, new_index: Mapping[int, int]) -> Skeleton:
    """The skeleton for another list of tensors, in which tensor `i` has the index `new_index[i]`."""
    return map_leaves(skeleton, lambda leaf: ("tensor", new_index[leaf[1]]) if leaf[0] == "tensor" else leaf)


@lru_cache(maxsize=1024)
def holds(skeleton: Skeleton, *kinds: str) -> bool:
    """Whether there is a node of one of these kinds in the tree."""
    return any(node[0] in kinds for node in nodes(skeleton))


def containers(skeleton: Skeleton, tree: Any) -> Iterator[list[Any] | dict[Any, Any] | FunctionType]:
    """The lists, dictionaries and functions in `tree`, without those in an output that it refers to."""
    kind, *parts = skeleton
    if kind in ("list", "dict") or isinstance(tree, FunctionType):
        yield tree
    if kind == "object" and parts[0] != "cache":  # blocks fill caches where they run
        yield from containers(parts[1], KINDS[parts[0]].to_tree(tree))
    if kind == "dict":
        for (_, part), value in zip(parts, tree.values(), strict=True):
            yield from containers(part, value)
    elif kind in ("tuple", "list"):
        for part, value in zip(parts, tree, strict=True):
            yield from containers(part, value)
