"""Recomputation: modules keep their inputs alone, and run again in the backward.

    F    block(x)          keeps x
    I    block(x) again    keeps tensors for its backward, which runs at once; the queue keeps those for `W`
    W                      nothing runs again

It is torch's non-reentrant checkpoint around the module's `forward`, on the instance: names, parameters, class and repr
stay as they are. Random numbers are those of the first run, whose generators' states are kept, and so are the values
that it makes `once`. Key/value caches, lists and dictionaries among the arguments, which the first run fills, are for
the second one as they were before.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).
"""

import copy
from collections import UserDict
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.made_once import MadeOnce
from lightning_hanayo.pipeline_parallel.pytree import is_cache
from lightning_hanayo.versions import identity_of

_ORIGINAL = "_forward_that_is_recomputed"
WAY_OUT = "Leave the block out: recompute=lambda name, block: ..., which says whether a block is recomputed."


def recompute(modules: Iterable[nn.Module]) -> None:
    """Let these modules keep their inputs alone, from now on."""
    for module in modules:
        if _ORIGINAL not in vars(module):
            object.__setattr__(module, _ORIGINAL, vars(module).get("forward"))
            object.__setattr__(module, "forward", MethodType(forward, module))


def stop_recomputing(modules: Iterable[nn.Module]) -> None:
    """Give the modules, and those inside them, their own `forward` back."""
    for module in (part for one in modules for part in one.modules()):
        if _ORIGINAL in vars(module):
            original = vars(module).pop(_ORIGINAL)
            del vars(module)["forward"]
            if original is not None:
                object.__setattr__(module, "forward", original)


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the module's forward. A function of this module, so that pickle finds it by name.

    Raises:
        UnsupportedError: it changes a buffer, which would change twice.
    """
    original = vars(module)[_ORIGINAL] or partial(type(module).forward, module)
    if not torch.is_grad_enabled():
        return original(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        return checkpoint(original, *args, use_reentrant=False, **kwargs)
    before = _versions(module)
    made = checkpoint(_Runs(original, args, kwargs), use_reentrant=False)
    changed = [name for name, version in _versions(module).items() if before.get(name) != version]
    if changed:
        raise UnsupportedError(
            f"recompute runs a {type(module).__name__} again in the backward, but its forward changes the buffer "
            f"{changed[0]}, which would change twice. {WAY_OUT}"
        )
    return made


class _Runs:
    """A call that is made first with its arguments, and then with caches and containers as they were before."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function = function
        self._first: Any = (args, kwargs)
        self._again = tree_map(as_now, (args, kwargs), is_leaf=is_cache)
        self._made = MadeOnce()

    def __call__(self) -> Any:
        (args, kwargs), self._first = self._first or tree_map(as_now, self._again, is_leaf=is_cache), None
        with self._made.running():
            return self._function(*args, **kwargs)


def as_now(value: Any) -> Any:
    """A copy of a cache or a UserDict, with its content of now; anything else itself."""
    if not is_cache(value):
        return copy.copy(value) if isinstance(value, UserDict) else value
    copied = copy.copy(value)
    for name, part in vars(value).items():
        if isinstance(part, list):
            vars(copied)[name] = [copy.copy(layer) for layer in part]
        elif isinstance(part, dict):
            vars(copied)[name] = dict(part)
        else:
            vars(copied)[name] = as_now(part)
    return copied


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensor each buffer is, and how often it was written."""
    return {name: identity_of(buffer) for name, buffer in module.named_buffers()}


def attention_of(block: nn.Module) -> list[nn.Module]:
    """The outermost modules inside a block whose class, or one that it derives from, is named after attention."""
    found: list[nn.Module] = []
    for module in block.children():
        if any("Attention" in kind.__name__ for kind in type(module).__mro__):
            found.append(module)
        else:
            found += attention_of(module)
    return found
