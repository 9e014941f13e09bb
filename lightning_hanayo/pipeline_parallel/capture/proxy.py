"""The proxy: stands for a block's output in the user's step while the block runs on another rank.

The user's code may pass a proxy to the next block, take it out of a tuple, or call functions of torch with it, which
the tracer records. What needs its value raises an error that names the user's line.
"""

import linecache
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.threads import current_tracer
from lightning_hanayo.pipeline_parallel.pytree import OutputReference, map_tree

_NOT_USER_CODE = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent), threading.__file__)
"""file names that begin so are not the user's code"""
SKIPPED_BLOCKS = (
    "Blocks that are left out (LayerDrop, self.blocks[:n]) must be called as well, and return their input; or delete "
    "them before the run."
)
"""how errors about missing calls of blocks end"""
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow", "and", "or", "xor")
_OPERATORS = (
    *(f"{prefix}{name}" for name in _ARITHMETIC for prefix in ("", "r", "i")),
    *("neg", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "divmod", "round"),
    *("getitem", "setitem", "delitem", "contains", "iter", "next", "reversed", "len"),
    *("bool", "int", "index", "float", "complex", "call"),
)


class Valueless:
    """Stands for a value that isn't on this rank: every use of it raises an error."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # copy, pickle and inspect look these up on every object
        self.refuse(f".{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name):
            self.refuse(f".{name} = ...")
        super().__setattr__(name, value)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _first_in((*args, *(kwargs or {}).values())).refuse(getattr(function, "__name__", str(function)))

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for a use of the value."""
        raise NotImplementedError


def _operator(name: str) -> Any:
    def operator(self: Valueless, *_: object) -> NoReturn:
        self.refuse(f"__{name}__")

    return operator


for _name in _OPERATORS:
    setattr(Valueless, f"__{_name}__", _operator(_name))


class Proxy(Valueless, OutputReference):
    """The part at `path` of output number `block`, of which this rank has no value.

    It is used like a tensor: the step's tracer records functions of torch that are called with it. It doesn't claim to
    be one: torch's C++ code would take any object whose `__class__` is Tensor for a tensor's memory.
    """

    __slots__ = ("__weakref__",)
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Proxy{list(self.path) or ''}"

    def __reduce__(self) -> Any:
        return Proxy, (self.path, self.block)

    def __getattr__(self, name: str) -> Any:
        found = None if name in ("__array__", "__deepcopy__") else getattr(torch.Tensor, name, None)
        if found is None or type(found).__name__ == "_DisabledTorchFunctionImpl":
            return super().__getattr__(name)
        if not callable(found):
            return _recorded(self, found.__get__, (self,))
        return lambda *args, **kwargs: _recorded(self, found, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _recorded(_first_in((*args, *(kwargs or {}).values())), function, args, kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for code that needs a value. It names the user's line."""
        tracer = current_tracer()
        if tracer is None or tracer.is_between_passes:
            why = (
                ", but it is on another pipeline stage: only the last block's output comes back to the step. Let the "
                "block store it as an attribute (self.value = x), which the step may read after the stack."
            )
        else:
            why = (
                f" before {tracer.next_block} is called, but its values are on another pipeline stage. Only functions "
                f"of torch may stand between two blocks, where the step doesn't depend on the values. Move other code "
                f"into the block, or name another stack with HanayoStrategy(blocks=...). {SKIPPED_BLOCKS}"
            )
        raise UnsupportedError(f"{user_line()} uses the output of a block ({operation}){why}")


def _recorded(proxy: Proxy, function: Any, args: Any, kwargs: Any = None) -> Any:
    """Record a function that is called with a proxy, and return proxies for its result; or its answer."""
    tracer = current_tracer()
    if tracer is None:
        proxy.refuse(getattr(function, "__name__", str(function)))
    return tracer.on_function(proxy, function, args, kwargs or {})


def functions_on_proxies(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function that doesn't know `__torch_function__`; with a proxy only where its value is here."""
    proxy = next((one for one in (*args, *kwargs.values()) if type(one) is Proxy), None)
    return function(*args, **kwargs) if proxy is None else _recorded(proxy, function, args, kwargs)


def _first_in(values: Sequence[Any]) -> Any:
    found = (x for value in values for x in (value if isinstance(value, (list, tuple)) else [value]))
    return next(x for x in found if isinstance(x, Valueless) or type(x) is Proxy)


def _recorded_operator(name: str) -> Any:
    function = getattr(torch.Tensor, name)

    def operator(self: Proxy, *args: Any) -> Any:
        return _recorded(self, function, (self, *args))

    return operator


for _name in _OPERATORS:
    if hasattr(torch.Tensor, f"__{_name}__") and _name not in ("iter", "contains"):
        setattr(Proxy, f"__{_name}__", _recorded_operator(f"__{_name}__"))


class Unavailable(Valueless):
    """A value that a block has stored, and that can't be sent to this rank. `why` begins with its name."""

    __slots__ = ("why",)
    __hash__ = object.__hash__
    why: str

    def __init__(self, why: str) -> None:
        self.why = why

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for code that reads the value."""
        raise UnsupportedError(
            f"{user_line()} reads a value that isn't here ({operation}): {self.why}. Let the block store tensors or "
            f"plain values, alone or in a tuple, list or dictionary, or return it."
        )


def user_line() -> str:
    """The user's line that is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USER_CODE):
        frame = frame.f_back
    if frame is None:
        return "your module"
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number} ({linecache.getline(file, number).strip()})"


def proxies_like(tree: Any, block: int) -> Any:
    """Return proxies for output number `block` in the containers of `tree`, so that tuples can be unpacked."""
    return map_tree(tree, lambda leaf, path: leaf if leaf is None else Proxy(path, block))


def subtree(tree: Any, path: tuple[Any, ...]) -> Any:
    """The part of `tree` at `path`."""
    for key in path:
        tree = tree[key]
    return tree
