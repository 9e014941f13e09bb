"""The proxy: stands for a block's output in the user's step while the block runs on another rank.

The user's code may pass a proxy to the next block, or take it out of a tuple. Any operation that needs its value raises
an error that names the user's line.
"""

import linecache
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.threads import current_tracer
from lightning_hanayo.pipeline_parallel.pytree import OutputReference

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
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        values = (*args, *(kwargs or {}).values())
        found = (x for value in values for x in (value if isinstance(value, (list, tuple)) else [value]))
        next(x for x in found if isinstance(x, Valueless)).refuse(getattr(function, "__name__", str(function)))

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
    """The part at `path` of the output of block number `block`, of which this rank has no value."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Proxy{list(self.path) or ''}"

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for code between two blocks that needs a value. It names the user's line."""
        tracer = current_tracer()
        if tracer is None or tracer.is_between_passes:
            where = ""
            way_out = (
                "Let the block store it as an attribute (self.value = x), which the step may read after the stack."
            )
        else:
            where = f" before {tracer.next_block} is called"
            way_out = (
                f"Move code between two blocks into the block, or name another stack with HanayoStrategy(blocks=...). "
                f"{SKIPPED_BLOCKS}"
            )
        raise UnsupportedError(
            f"{user_line()} uses the output of a block ({operation}){where}, but it is on another pipeline stage: of "
            f"the stack's outputs only the last block's comes back to the step. {way_out}"
        )


class Unavailable(Valueless):
    """A value that a block has stored, and that can't be sent to this rank. `why` begins with its name."""

    __slots__ = ("why",)
    __hash__ = object.__hash__
    why: str

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return f"Unavailable({self.why!r})"

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for code that reads the value."""
        raise UnsupportedError(
            f"{user_line()} reads a value that isn't here ({operation}): {self.why}. Let the block store a tensor, a "
            f"plain Python value, or a tuple, list or dictionary of them, or return it."
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


def proxies_like(tree: Any, block: int, path: tuple[Any, ...] = ()) -> Any:
    """Return proxies for the output of `block` in the containers of `tree`, so that tuples can be unpacked."""
    if type(tree) in (tuple, list):
        return type(tree)(proxies_like(item, block, (*path, i)) for i, item in enumerate(tree))
    if isinstance(tree, dict):
        return {key: proxies_like(item, block, (*path, key)) for key, item in tree.items()}
    return tree if tree is None else Proxy(path, block)


def subtree(tree: Any, path: tuple[Any, ...]) -> Any:
    """The part of `tree` at `path`."""
    for key in path:
        tree = tree[key]
    return tree
