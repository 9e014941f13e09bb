"""The inside: a module's own forward, run on whole sequences and this rank's part of its heads or features.

forward(module, x, ...)    x [batch/x, seq/y, h/z]  --enter-->  [batch/x, seq, h/z]  -->  the forward of its class

What is drawn inside, an attention's dropout, comes from this rank's own stream.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.linear_modules import as_autocast
from lightning_hanayo.tensor3d.boundary.shared_input import SharedInput
from lightning_hanayo.tensor3d.convert.specs.spec import attribute
from lightning_hanayo.tensor3d.layers.dropout import own_stream
from lightning_hanayo.tensor3d.stage_context import StageContext

_INSIDE = "_inside"


@dataclass(frozen=True)
class GatheredForward:
    """What happens around a module's forward.

    Args:
        setting: the stage's.
        entry: brings the input together; None: the module's linear layers do.
        input: its argument's name.
        index: its place among the arguments.
        dropout: the attribute with the probability of what the forward drops; None: it drops nothing itself.
    """

    setting: StageContext
    entry: SharedInput | None
    input: str
    index: int
    dropout: str | None

    def __deepcopy__(self, memo: Any) -> "GatheredForward":
        return self

    def entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with the input brought together."""
        if self.entry is None:
            return args, kwargs
        x = kwargs[self.input] if self.input in kwargs else args[self.index]
        whole = self.entry.enter(as_autocast(x))  # linear layers read it, which would cast it, each by itself
        if self.input in kwargs:
            return args, kwargs | {self.input: whole}
        return (*args[: self.index], whole, *args[self.index + 1 :]), kwargs

    def stream(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """What random numbers are drawn from."""
        if self.dropout is None or not module.training or not attribute(module, self.dropout):
            return nullcontext()
        return own_stream(self.setting, _device(args, kwargs))


def wrap(
    module: nn.Module, setting: StageContext, entry: SharedInput | None, input: str | None, dropout: str | None
) -> None:
    """Put it around the module's forward, on the instance: its class, names and repr stay."""
    names = list(signature(type(module).forward).parameters)[1:]
    inside = GatheredForward(setting, entry, input or "", names.index(input) if input else 0, dropout)
    object.__setattr__(module, _INSIDE, inside)
    module.forward = MethodType(forward, module)


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What stands for the module's forward. Its name is what pickle looks up."""
    inside: GatheredForward = vars(module)[_INSIDE]
    args, kwargs = inside.entered(args, kwargs)
    try:
        with inside.stream(module, args, kwargs):
            return type(module).forward(module, *args, **kwargs)
    finally:
        if inside.entry is not None:
            inside.entry.leave()


def _device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    tensors: Iterator[Tensor] = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next(tensors).device
