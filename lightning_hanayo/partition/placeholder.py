"""Replaces the parameters of other pipeline ranks by placeholders on the meta device, which take no memory."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Placeholder(nn.Parameter):
    """A parameter on the meta device in place of one that another pipeline rank owns.

    Its class tells it from a parameter that is on the meta device because it has no values yet.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make pickle and deepcopy return a Placeholder, not a plain Parameter."""
        return _restore, (self.data, self.requires_grad, vars(self))


def _restore(data: torch.Tensor, requires_grad: bool, attributes: dict[str, Any]) -> Placeholder:
    placeholder = Placeholder(data, requires_grad)
    vars(placeholder).update(attributes)
    return placeholder


def replace_with_placeholders(model: nn.Module, keep: set[nn.Parameter], buffers_of: Iterable[nn.Module] = ()) -> None:
    """Replace all parameters but those in `keep` by placeholders, and move the buffers of `buffers_of` to meta.

    Placeholders are new Parameters with the same shape, dtype, requires_grad and ties, so that optimizers, parameter
    groups and state dicts keep the indices and names that they have in a single process.
    """
    placeholders: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in keep:
                module._parameters[name] = _placeholder(parameter, placeholders)  # type: ignore[assignment]
    for module in buffers_of:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to("meta")


def _placeholder(parameter: nn.Parameter, placeholders: dict[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The placeholder of `parameter`: one for all modules that share it."""
    if isinstance(parameter, Placeholder):
        return parameter
    if parameter not in placeholders:
        attributes = vars(parameter)  # users and optimizers set attributes on parameters
        empty = torch.empty_like(parameter, device="meta")
        placeholders[parameter] = _restore(empty, parameter.requires_grad, attributes)
    return placeholders[parameter]
