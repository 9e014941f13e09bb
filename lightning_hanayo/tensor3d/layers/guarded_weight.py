"""Guards a 3-D layer's `weight` against code outside the layer, which may read shape and dtype, but not the values.

A sum or a product over a shard looks like one over the whole weight, and would be wrong without an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.errors import UnsupportedError

_SIZE_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_contiguous")
_TYPE_METHODS = ("type", "get_device", "is_floating_point", "is_complex")
_ALLOWED = frozenset((*_SIZE_METHODS, *_TYPE_METHODS, "__get__", "__repr__", "__hash__"))


class GuardedWeight(Tensor):
    """An alias of a shard that refuses every computation."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run what reads no values.

        Raises:
            UnsupportedError: `func` reads them.
        """
        name = getattr(func, "__name__", str(func))
        if name not in _ALLOWED:
            raise UnsupportedError(
                f"{name} was called with the weight of a 3-D layer, of which this rank holds a part: the result would "
                f"be wrong. Call the layer itself, or leave it out of the cube."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def guarded_weight(module: Any, name: str = "weight") -> GuardedWeight:
    """The getter of a 3-D layer's `weight`, or of another parameter."""
    parameter = module._parameters.get(name)
    if parameter is None:
        raise AttributeError(f"{type(module).__name__} has no attribute {name!r}")
    with torch._C.DisableTorchFunctionSubclass():
        alias: GuardedWeight = parameter.detach().as_subclass(GuardedWeight)
        alias.requires_grad_(parameter.requires_grad)
        return alias
