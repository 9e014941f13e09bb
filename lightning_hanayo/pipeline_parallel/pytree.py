"""Flattens a pytree that is sent between stages into a hashable skeleton and a list of tensors, and puts it together.

A tree is a tensor, a plain Python value, an output reference, or a tuple, list or dict of trees; among the arguments of
blocks also one of the objects below. A tensor that occurs twice is listed once, so a mask that every block
gets is sent once.

    (h, {"mask": m, "causal": True}, m)  ->  skeleton ("tuple", T0, ("dict", ("mask", T1), ("causal", True)), T1)
                                             tensors  [h, m]

Objects that blocks get as arguments become trees, too:

    BlockMask               its tensors, and its function           masks of FlexAttention
    function                where its code is, its closure, and     a mask_mod, a score_mod
                            the numbers that are global in it
    jagged nested tensor    values and offsets                      sequences of several lengths
    Cache                   class and attributes                    keys and values that a prefix encoder has made
    UserDict                class and content                       transformers' KVSharingDict

A dictionary that several blocks get may be numbered, so that it is one object for all blocks of a stage, too.

All ranks run the same program, so a function is sent as the place of its code in it.
"""

import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from inspect import unwrap
from itertools import count
from math import copysign
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_hanayo.errors import UnsupportedError

Skeleton = tuple[Any, ...]
NONE: Skeleton = ("plain", "NoneType", None)
PLAIN = (type(None), bool, int, float, str)


class OutputReference:
    """Refers to the part at `path` of output number `block`, which is not known here."""

    __slots__ = ("block", "path")
    block: int
    path: tuple[Any, ...]

    def __init__(self, path: tuple[Any, ...] = (), block: int = 0) -> None:
        object.__setattr__(self, "path", path)  # past a proxy's own `__setattr__`, which refuses most names
        object.__setattr__(self, "block", block)


class Flattener:
    """Flattens trees into skeletons that share one list of tensors."""

    def __init__(self, numbered: list[Any] | None = None) -> None:
        self.numbered = numbered
        """the dictionaries among the arguments so far, which get their places in it as numbers; None: they get none"""
        self.tensors: list[Tensor] = []
        self._indices: dict[int, int] = {}
        self._objects: dict[int, tuple[Any, Skeleton | None]] = {}

    def flatten(self, tree: Any, what: str = "value", *, is_argument: bool = False) -> Skeleton:
        """Return the skeleton of `tree`, and add its tensors to the list; `what` names the tree in errors.

        Raises:
            UnsupportedError: a value in it can't be sent; the message gives its path and type.
        """
        kind = type(tree)
        if kind in PLAIN:
            sign = "-" if kind is float and not tree and copysign(1.0, tree) < 0 else ""
            return ("plain", sign + kind.__name__, tree)  # with its type, as True == 1 == 1.0, and 0.0 == -0.0
        if issubclass(kind, OutputReference):  # one that user code takes for a tensor
            return ("proxy", tree.block, tree.path)
        if isinstance(tree, Tensor):
            is_wrapper = type(tree) is not Tensor and is_traceable_wrapper_subclass(tree)
            if is_wrapper or tree.layout is not torch.strided or tree.is_nested:  # its values aren't one array
                return self._object(tree, what)
            if id(tree) not in self._indices:
                self._indices[id(tree)] = len(self.tensors)
                self.tensors.append(tree)
            return ("tensor", self._indices[id(tree)])
        if kind is tuple or kind is list:
            parts = [
                NONE if item is None else self.flatten(item, f"{what}[{i}]", is_argument=is_argument)
                for i, item in enumerate(tree)
            ]
            return (kind.__name__, *parts)
        if isinstance(tree, dict) and kind.__module__ in ("builtins", "collections"):
            items = [
                (self.flatten(k, what), self.flatten(v, f"{what}[{k!r}]", is_argument=is_argument))
                for k, v in tree.items()
            ]
            if self.numbered is None or not is_argument:
                return ("dict", *items)
            if all(one is not tree for one in self.numbered):
                self.numbered.append(tree)
            return ("shared", next(i for i, one in enumerate(self.numbered) if one is tree), ("dict", *items))
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
        if id(value) not in self._objects or isinstance(value, UserDict):  # whose content may be another one now
            self._objects[id(value)] = value, None  # until its parts are known, which may refer to it
            kind = next((kind for kind in KINDS.values() if kind.matches(value)), None)
            tree = None if kind is None else kind.to_tree(value)
            if kind is not None and tree is not None:
                parts = self.flatten(tree, what, is_argument=True)
                self._objects[id(value)] = value, ("object", kind.name, parts)
        skeleton = self._objects[id(value)][1]
        if skeleton is None:
            raise _unsendable(value, what)
        return skeleton


def _unsendable(value: Any, what: str) -> UnsupportedError:
    kind = type(value)
    if isinstance(value, Tensor):
        shown = f"{'nested ' * value.is_nested}{kind.__name__} ({value.layout})"
        return UnsupportedError(
            f"{what} is a {shown}, which can't be sent to the next pipeline stage. Strided tensors can, and nested "
            f"ones of the layout torch.jagged: torch.nested.nested_tensor(..., layout=torch.jagged)."
        )
    name = f" ({value.__module__}.{value.__qualname__})" if isinstance(value, (type, FunctionType)) else ""
    return UnsupportedError(
        f"{what} is a {kind.__module__}.{kind.__qualname__}{name}, which can't be sent to the next pipeline stage. "
        f"Tensors, plain values, tuples, lists and dictionaries can, and as arguments named classes and functions."
    )


def unflatten(
    skeleton: Skeleton,
    tensors: Sequence[Tensor],
    fill: Callable[..., Any] = OutputReference,
    share: Callable[[int, Callable[[], Any]], Any] = lambda _, make: make(),
) -> Any:
    """Put a tree together again.

    `fill` is called with path and block of each output reference, and replaces it. `share` is called with the number of
    a dictionary and a function that makes it.
    """
    kind = skeleton[0]
    if kind == "tensor":
        return tensors[skeleton[1]]
    if kind == "plain":
        return skeleton[2]
    if kind == "proxy":
        return fill(skeleton[2], skeleton[1])
    if kind == "object":
        return KINDS[skeleton[1]].from_tree(unflatten(skeleton[2], tensors, fill, share))
    if kind == "shared":
        return share(skeleton[1], lambda: unflatten(skeleton[2], tensors, fill, share))
    if kind == "size":
        return torch.Size(skeleton[1:])
    if kind == "dtype":
        return getattr(torch, skeleton[1])
    parts = [part for _, part in skeleton[1:]] if kind == "dict" else skeleton[1:]
    # this runs for each call of a block: most parts are tensors and plain values, for which no function is called
    values = [
        tensors[p[1]] if p[0] == "tensor" else p[2] if p[0] == "plain" else unflatten(p, tensors, fill, share)
        for p in parts
    ]
    if kind == "dict":
        keys = [key[2] if key[0] == "plain" else unflatten(key, tensors, fill, share) for key, _ in skeleton[1:]]
        return dict(zip(keys, values, strict=True))
    return values if kind == "list" else tuple(values)


Paths = tuple[tuple[Any, ...], ...]
ANYWHERE: Paths = ((),)


def value_paths(tree: Any) -> Paths:
    """Where a tree has values other than None."""
    found: list[tuple[Any, ...]] = []
    map_tree(tree, lambda leaf, path: None if leaf is None else found.append(path))
    return tuple(found)


def hidden_part(known: Paths, tree: Any, what: str) -> str:
    """Where `tree` has a value that is neither at one of these paths nor below one; "" if nowhere."""
    hidden = (path for path in value_paths(tree) if all(path[: len(one)] != one for one in known))
    return next((what + "".join(f"[{key!r}]" for key in path) for path in hidden), "")


def _parts(node: Skeleton) -> Sequence[Skeleton]:
    """The nodes that are directly in a node."""
    kind, *parts = node
    if kind == "dict":
        return [one for pair in parts for one in pair]
    return parts if kind in ("tuple", "list") else parts[1:] if kind in ("object", "shared") else ()


def _with_parts(node: Skeleton, parts: Sequence[Skeleton]) -> Skeleton:
    """The node with others directly in it."""
    if not parts:
        return node
    if node[0] == "dict":
        return ("dict", *zip(parts[::2], parts[1::2], strict=True))
    return (*node[: 1 + (node[0] in ("object", "shared"))], *parts)


def nodes(skeleton: Skeleton) -> Iterator[Skeleton]:
    """All nodes of a skeleton, from the root on."""
    yield skeleton
    for part in _parts(skeleton):
        yield from nodes(part)


@lru_cache(maxsize=256)
def has_proxies(skeleton: Skeleton) -> bool:
    """Whether there are output references in it."""
    return any(node[0] == "proxy" for node in nodes(skeleton))


def map_leaves(skeleton: Skeleton, change: Callable[[Skeleton], Skeleton]) -> Skeleton:
    """The skeleton with `change` applied to each tensor and each output reference."""
    if skeleton[0] in ("tensor", "proxy"):
        return change(skeleton)
    return _with_parts(skeleton, [map_leaves(part, change) for part in _parts(skeleton)])


def map_nodes(skeleton: Skeleton, change: Callable[[int, Skeleton], Skeleton]) -> Skeleton:
    """The skeleton with `change` applied to each node and its number, in the order of `nodes`."""
    numbers = count()

    def walk(node: Skeleton) -> Skeleton:
        node = change(next(numbers), node)
        return _with_parts(node, [walk(part) for part in _parts(node)])

    return walk(skeleton)


def tensor_indices(skeleton: Skeleton) -> list[int]:
    """The indices of the skeleton's tensors in the list of tensors, in order of first use."""
    return list(dict.fromkeys(node[1] for node in nodes(skeleton) if node[0] == "tensor"))


def renumber(skeleton: Skeleton, new_index: Mapping[int, int]) -> Skeleton:
    """The skeleton for another list of tensors, in which tensor `i` has the index `new_index[i]`."""
    return map_leaves(skeleton, lambda leaf: ("tensor", new_index[leaf[1]]) if leaf[0] == "tensor" else leaf)


def containers(tree: Any) -> Iterator[list[Any] | dict[Any, Any] | FunctionType]:
    """The lists, dictionaries and functions in `tree`, without those in caches, which blocks fill where they run."""
    if isinstance(tree, list | dict | FunctionType):
        yield tree
    parts: Any = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    kind = None if isinstance(tree, Tensor) else next((kind for kind in KINDS.values() if kind.matches(tree)), None)
    if kind is not None and kind.name != "cache":
        parts = (kind.to_tree(tree),)
    for part in parts:
        yield from containers(part)


_NUMBERS = (bool, int, float)
_FLEX = "torch.nn.attention.flex_attention"


@dataclass(frozen=True)
class ObjectKind:
    """How objects of one kind become a tree of tensors and plain values, and are built of it again."""

    name: str
    matches: Callable[[Any], bool]
    to_tree: Callable[[Any], Any]
    """None, if the object can't be sent"""
    from_tree: Callable[[Any], Any]


def is_cache(value: Any) -> bool:
    """Whether it is a key/value cache of transformers."""
    kind: Any = type(value)
    return is_cache_class(kind)


@lru_cache(maxsize=1024)
def is_cache_class(kind: type) -> bool:
    """Whether it is the class of such caches."""
    return any(k.__name__ == "Cache" and k.__module__.startswith("transformers") for k in kind.__mro__)


def map_tree(tree: Any, change: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """The tree with `change` applied to each leaf and its path. Named tuples and torch's return types stay such."""
    if isinstance(tree, (tuple, list)) and type(tree) is not torch.Size:
        items = [map_tree(item, change, (*path, i)) for i, item in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_make") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: map_tree(item, change, (*path, key)) for key, item in tree.items()}
    return change(tree, path)


def with_ragged_dims_of(known: Sequence[Tensor], tree: Any) -> Any:
    """The tree with the offsets of the `known` nested tensors where they are equal: torch compares their identity."""

    def change(leaf: Any, _: object) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_nested:
            return leaf
        values, *sizes, ragged_dim = _nested_parts(leaf)
        for one in known:
            _, *own, _ = _nested_parts(one)
            pairs = zip(own, sizes, strict=True)
            if all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs):
                return _nested_of((values, *own, ragged_dim))
        return leaf

    return map_tree(tree, change)


def _nested_parts(nested: Any) -> Any:
    if nested.layout is not torch.jagged:
        return None
    return nested.values(), nested.offsets(), nested.lengths(), nested._ragged_idx


def _nested_of(parts: Any) -> Tensor:
    values, offsets, lengths, ragged_dim = parts
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged_dim)


def _function_place(function: FunctionType) -> tuple[Any, ...] | None:
    """Module and name of the outermost function, the number of the code in it, and the values that it refers to.

    Global numbers and tensors are sent, too, as the step may have set them; also those of its module's functions that
    it calls. None if it isn't found there.
    """
    module = sys.modules.get(function.__module__)
    if module is None:
        return None
    named = (name for name, value in vars(module).items() if value is function)  # lambdas don't know their names
    name = next(named, function.__qualname__.partition(".<locals>")[0])
    codes = list(_codes(function.__module__, name))
    cells = function.__closure__ or ()
    number = next((i for i, code in enumerate(codes) if code is function.__code__), None)
    if number is None or any(cell == CellType() for cell in cells):
        return None
    values = {key: cell.cell_contents for key, cell in zip(function.__code__.co_freevars, cells, strict=True)}
    defaults = function.__defaults__, function.__kwdefaults__
    return function.__module__, name, number, values, *defaults, *_global_values(function)


def _function_at(place: tuple[Any, ...]) -> FunctionType:
    module, name, number, values, defaults, keyword_defaults, numbers, functions = place
    code = list(_codes(module, name))[number]
    cells = tuple(CellType(values[key]) for key in code.co_freevars)
    known = vars(sys.modules[module])
    if numbers:
        known = known | numbers
        for own in functions:  # those that it calls see the same numbers
            called = known[own]
            known[own] = FunctionType(called.__code__, known, called.__name__, called.__defaults__, called.__closure__)
            known[own].__kwdefaults__ = called.__kwdefaults__
    function = FunctionType(code, known, code.co_name, defaults, cells)
    function.__kwdefaults__ = keyword_defaults
    function.__qualname__ = code.co_qualname
    return function


def _global_values(function: FunctionType) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The global numbers and tensors that a function reads, and the names of its module's functions that it calls."""
    known = function.__globals__
    numbers: dict[str, Any] = {}
    functions: dict[str, None] = {}
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        waiting.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
        for name in code.co_names:
            value = known.get(name)
            if isinstance(value, Tensor) or type(value) in _NUMBERS:
                numbers[name] = value
            elif isinstance(value, FunctionType) and value.__globals__ is known and name not in functions:
                functions[name] = None
                waiting.append(value.__code__)
    return numbers, tuple(functions)


def values_of(function: FunctionType) -> list[Any]:
    """The values in its closure and of its global names, which it may have changed."""
    numbers, _ = _global_values(function)
    return [*(cell.cell_contents for cell in function.__closure__ or ()), *numbers.values()]


def _codes(module: str, name: str) -> Iterator[CodeType]:
    """The code of a module's function, and of the functions in it, always in the same order."""
    found: Any = _named(import_module(module), name)
    found = found.fget if isinstance(found, property) else found
    found = unwrap(found) if callable(found) else None
    waiting: list[CodeType] = [found.__code__] if hasattr(found, "__code__") else []
    while waiting:
        code = waiting.pop()
        yield code
        waiting.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))


def _instance_of(parts: tuple[Any, ...]) -> Any:
    kind, attributes = parts
    instance = kind.__new__(kind)
    vars(instance).update(attributes)
    return instance


def _user_dict_parts(value: UserDict[Any, Any]) -> Any:
    place = _class_place(type(value))
    return (*place, value.data) if place is not None and vars(value).keys() == {"data"} else None


def _user_dict_of(parts: tuple[str, str, dict[Any, Any]]) -> Any:
    module, name, data = parts
    return _instance_of((_named(import_module(module), name), {"data": data}))


def _is_of_cache(value: Any) -> bool:
    return is_cache(value) or any(kind.__name__.endswith("CacheLayerMixin") for kind in type(value).__mro__)


def _class_place(kind: type) -> tuple[str, str] | None:
    place = kind.__module__, kind.__qualname__
    return place if _named(sys.modules.get(kind.__module__), kind.__qualname__) is kind else None


def _named(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


KINDS = {
    kind.name: kind
    for kind in (
        ObjectKind("nested", lambda value: isinstance(value, Tensor) and value.is_nested, _nested_parts, _nested_of),
        ObjectKind("BlockMask", lambda value: type(value).__name__ == "BlockMask" and type(value).__module__ == _FLEX,
                   vars, lambda attributes: import_module(_FLEX).BlockMask(**attributes)),
        ObjectKind("function", lambda value: isinstance(value, FunctionType), _function_place, _function_at),
        ObjectKind("partial", lambda value: type(value) is partial, lambda p: (p.func, p.args, p.keywords),
                   lambda parts: partial(parts[0], *parts[1], **parts[2])),
        ObjectKind("cache", _is_of_cache, lambda value: (type(value), vars(value)), _instance_of),
        ObjectKind("class", lambda value: isinstance(value, type), _class_place,
                   lambda place: _named(import_module(place[0]), place[1])),
        ObjectKind("UserDict", lambda value: isinstance(value, UserDict), _user_dict_parts, _user_dict_of),
        ObjectKind("slice", lambda value: isinstance(value, slice), lambda s: (s.start, s.stop, s.step),
                   lambda parts: slice(*parts)),
        ObjectKind("Ellipsis", lambda value: value is ..., lambda _: (), lambda _: ...),
        ObjectKind("layout", lambda value: isinstance(value, (torch.layout, torch.memory_format)),
                   lambda value: str(value).removeprefix("torch."), lambda name: getattr(torch, name)),
        ObjectKind("device", lambda value: isinstance(value, torch.device), lambda d: d.type, torch.device),
    )
}  # fmt: skip
"""by name; no others can be sent"""
