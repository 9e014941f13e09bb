"""What blocks get as arguments besides tensors and containers, as trees that can be sent.

    BlockMask               its tensors, and its function           masks of FlexAttention
    function                where its code is, its closure, and     a mask_mod, a score_mod
                            the numbers that are global in it
    jagged nested tensor    values and offsets                      sequences of several lengths
    Cache                   class and attributes                    keys and values that a prefix encoder has made

All ranks run the same program, so a function is sent as the place of its code in it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import unwrap
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

_NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class ObjectKind:
    """How objects of one kind become a tree of tensors and plain values, and are built of it again."""

    name: str
    matches: Callable[[Any], bool]
    to_tree: Callable[[Any], Any]
    """None, if the object can't be sent"""
    from_tree: Callable[[Any], Any]


def kind_of(value: Any) -> ObjectKind | None:
    """The kind of `value`; None if there is none for it."""
    return next((kind for kind in KINDS.values() if kind.matches(value)), None)


def is_cache(value: Any) -> bool:
    """Whether it is a key/value cache of transformers."""
    return any(k.__name__ == "Cache" and k.__module__.startswith("transformers") for k in type(value).__mro__)


def with_ragged_dims_of(known: Sequence[Tensor], tree: Any) -> Any:
    """The tree with the offsets of the `known` nested tensors where they are equal: torch compares their identity."""
    if type(tree) in (tuple, list):
        return type(tree)(with_ragged_dims_of(known, item) for item in tree)
    if type(tree) is dict:
        return {key: with_ragged_dims_of(known, item) for key, item in tree.items()}
    if not isinstance(tree, Tensor) or not tree.is_nested:
        return tree
    values, *sizes, ragged_dim = _nested_parts(tree)
    for one in known:
        _, *own, _ = _nested_parts(one)
        if all(map(_is_equal, own, sizes)):
            return _nested_of((values, *own, ragged_dim))
    return tree


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _nested_parts(nested: Any) -> Any:
    if nested.layout is not torch.jagged:
        return None
    return nested.values(), nested.offsets(), nested.lengths(), nested._ragged_idx


def _nested_of(parts: Any) -> Tensor:
    values, offsets, lengths, ragged_dim = parts
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged_dim)


def _is_block_mask(value: Any) -> bool:
    return type(value).__name__ == "BlockMask" and type(value).__module__ == "torch.nn.attention.flex_attention"


def _block_mask_of(attributes: Any) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask(**attributes)


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
        for called in functions:
            known[called] = _with_globals(known[called], known)
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


def _with_globals(function: FunctionType, known: dict[str, Any]) -> FunctionType:
    copied = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def values_of(function: FunctionType) -> list[Any]:
    """What it refers to by its closure and by global names, and may have changed."""
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


def _instance_parts(instance: Any) -> tuple[Any, ...]:
    return type(instance), vars(instance)


def _instance_of(parts: tuple[Any, ...]) -> Any:
    kind, attributes = parts
    instance = kind.__new__(kind)
    vars(instance).update(attributes)
    return instance


def _is_of_cache(value: Any) -> bool:
    return is_cache(value) or any(kind.__name__.endswith("CacheLayerMixin") for kind in type(value).__mro__)


def _class_place(kind: type) -> tuple[str, str] | None:
    place = kind.__module__, kind.__qualname__
    return place if _named(sys.modules.get(kind.__module__), kind.__qualname__) is kind else None


def _class_at(place: tuple[str, str]) -> Any:
    module, name = place
    return _named(import_module(module), name)


def _named(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


KINDS = {
    kind.name: kind
    for kind in (
        ObjectKind("nested", lambda value: isinstance(value, Tensor) and value.is_nested, _nested_parts, _nested_of),
        ObjectKind("BlockMask", _is_block_mask, vars, _block_mask_of),
        ObjectKind("function", lambda value: isinstance(value, FunctionType), _function_place, _function_at),
        ObjectKind("partial", lambda value: type(value) is partial, lambda p: (p.func, p.args, p.keywords),
                   lambda parts: partial(parts[0], *parts[1], **parts[2])),
        ObjectKind("cache", _is_of_cache, _instance_parts, _instance_of),
        ObjectKind("class", lambda value: isinstance(value, type), _class_place, _class_at),
        ObjectKind("device", lambda value: isinstance(value, torch.device), lambda d: d.type, torch.device),
    )
}  # fmt: skip
"""by name; no others can be sent"""
