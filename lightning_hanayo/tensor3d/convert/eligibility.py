"""Which linear layers can be sharded, and why others can't."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor, nn

from lightning_hanayo.linear_modules import has_gradient_hooks


class ParameterOwners:
    """How many modules of a stack's blocks hold each parameter: a module in two blocks counts twice, as each block has
    a context of its own. Those that are used `outside` too count once more.

    The modules called `exclude`, and all in them, are not to be sharded.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], outside: Iterable[Tensor] = (), exclude: Collection[str] = ()
    ) -> None:
        self._count: Counter[Tensor] = Counter(
            parameter
            for block in blocks
            for module in block.modules()
            for parameter in module._parameters.values()
            if parameter is not None
        )
        self._count.update(outside)
        paths = ((f".{path}.", part) for block in blocks for path, part in block.named_modules())
        self.excluded = {part for path, part in paths if any(f".{name}." in path for name in exclude)}

    def shared_parameter(self, module: nn.Module) -> str | None:
        """Returns the name of a parameter that `module` shares with another module; None if there is none."""
        return next((name for name, p in module._parameters.items() if p is not None and self._count[p] > 1), None)


def reason_ineligible(module: nn.Module, owners: ParameterOwners) -> str | None:
    """Returns why a linear layer's parameters can't be sharded; None if they can."""
    weight = module._parameters.get("weight")
    if module in owners.excluded:
        return "left out by cube_exclude"
    if weight is None:
        return "its weight is computed from other parameters"
    if name := owners.shared_parameter(module):
        return f"its {name} is another module's too"
    if any(has_gradient_hooks(parameter) for parameter in module._parameters.values() if parameter is not None):
        return "its parameters have hooks, which would see a part of each"
    if any(name not in ("weight", "bias") for name in module._parameters):
        return "it has parameters besides weight and bias"
    return "its instance has a forward of its own" if has_instance_forward(module) else None


def has_instance_forward(module: nn.Module) -> bool:
    """Returns whether this instance runs another forward than its class's, and not one of this package."""
    forward = vars(module).get("forward")
    return forward is not None and not getattr(forward, "__module__", "").startswith("lightning_hanayo.")


def has_module_hooks(module: nn.Module) -> bool:
    """Returns whether hooks see what goes through the module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
