"""Guards a 3-D layer's `weight` against code outside the layer, which may read shape and dtype, but not the values."""

from typing import Any

from torch import Tensor

from lightning_hanayo.partial_values import PartialParameter, partial_alias


def guarded_weight(module: Any, name: str = "weight") -> Tensor:
    """The getter of a 3-D layer's `weight`, or of another parameter.

    User code gets the parameter itself, which is guarded while user code runs; other code an alias.
    """
    parameter = module._parameters.get(name)
    if parameter is None:
        raise AttributeError(f"{type(module).__name__} has no attribute {name!r}")
    if isinstance(parameter, PartialParameter):
        return parameter
    return partial_alias(parameter, vars(parameter).get("_part")).requires_grad_(parameter.requires_grad)
