"""Wraps a module's forward, which then runs on whole sequences and on this rank's heads or features.

forward(module, x, ...)    x [batch/x, seq/y, h/z]  --all-gather-->  [batch/x, seq, h/z]  -->  its class's forward

What the forward draws itself, as an attention its dropout, comes from this rank's own random stream.
"""

from dataclasses import dataclass
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.linear_modules import as_autocast
from lightning_hanayo.tensor3d.convert.specs.spec import attribute
from lightning_hanayo.tensor3d.layers.dropout import rank_random_stream
from lightning_hanayo.tensor3d.layers.linear import SharedInput
from lightning_hanayo.tensor3d.stage_context import StageContext


@dataclass(frozen=True)
class GatheredForward:
    """What happens before and after a module's own forward.

    `shared_input` gathers the argument `input`, which may be given at position `index`, and multiplies it. None: linear
    layers gather it.
    `dropout` is the attribute with the probability of what the forward drops. None: it drops nothing itself.
    """

    context: StageContext
    shared_input: SharedInput | None
    input: str
    index: int
    dropout: str | None

    def gather_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments, with the input gathered."""
        if self.shared_input is None:
            return args, kwargs
        x = kwargs[self.input] if self.input in kwargs else args[self.index]
        gathered = self.shared_input.all_gather(as_autocast(x))  # cast once, not by each linear layer that reads it
        if self.input in kwargs:
            return args, kwargs | {self.input: gathered}
        return (*args[: self.index], gathered, *args[self.index + 1 :]), kwargs

    def drops(self, module: nn.Module) -> bool:
        """Whether the forward draws random numbers."""
        return self.dropout is not None and module.training and bool(attribute(module, self.dropout))


def wrap_forward(
    module: nn.Module, context: StageContext, shared_input: SharedInput | None, input: str | None, dropout: str | None
) -> None:
    """Wrap the forward of this instance. Its class, names and repr stay."""
    names = list(signature(type(module).forward).parameters)[1:]
    wrapper = GatheredForward(context, shared_input, input or "", names.index(input) if input else 0, dropout)
    object.__setattr__(module, "_gathered_forward", wrapper)
    module.forward = MethodType(forward, module)


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the module's forward. A function of this module, so that pickle finds it by name."""
    wrapper: Any = module._gathered_forward
    if wrapper.drops(module):
        return _run_with_dropout(module, *args, **kwargs)
    return _run(module, *args, **kwargs)


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    wrapper: Any = module._gathered_forward
    args, kwargs = wrapper.gather_input(args, kwargs)
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        if wrapper.shared_input is not None:
            wrapper.shared_input.clear()


@torch.compiler.disable
def _run_with_dropout(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Draws from this rank's own stream. A compiled graph has one stream for all."""
    wrapper: Any = module._gathered_forward
    device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    with rank_random_stream(wrapper.context, device):
        return _run(module, *args, **kwargs)
