"""The ordinary linear layer: which modules are ones that can be spread over the grid, and why others can't."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hanayo.linear_modules import has_gradient_hooks


class Owners:
    """How many modules have a parameter.

    Args:
        blocks: of the whole stack.
        outside: parameters that are used elsewhere too.
    """

    def __init__(self, blocks: Sequence[nn.Module], outside: Iterable[Tensor] = ()) -> None:
        modules = {module: None for block in blocks for module in block.modules()}
        self._count: Counter[Tensor] = Counter(
            parameter for module in modules for parameter in module._parameters.values() if parameter is not None
        )
        self._count.update(outside)

    def shared(self, module: nn.Module) -> str | None:
        """The name of a parameter of `module` that it doesn't have for itself."""
        return next((name for name, p in module._parameters.items() if p is not None and self._count[p] > 1), None)


def obstacle(module: nn.Module, owners: Owners) -> str | None:
    """Why a linear layer's parameters can't be cut; None if they can."""
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters"
    if name := owners.shared(module):
        return f"its {name} is another module's too"
    parameters: list[Any] = [parameter for parameter in module._parameters.values() if parameter is not None]
    if any(map(has_gradient_hooks, parameters)):
        return "its parameters have hooks, which would see a part of each"
    if any(name not in ("weight", "bias") for name in module._parameters):
        return "it has parameters besides weight and bias"
    return "its forward is its own" if has_own_forward(module) else None


def has_own_forward(module: nn.Module) -> bool:
    """Whether something else than the class's forward runs on this instance, and not of this package's."""
    forward = vars(module).get("forward")
    return forward is not None and not getattr(forward, "__module__", "").startswith("lightning_hanayo.")


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks see what goes through the module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
