"""Replaces the `forward` of a stage's linear layers, so that a backward can leave their weight gradients to the queue.

The replacement is an attribute of the instance. Names, parameters, class and repr of a layer stay as they are, and its
copies and pickles are ordinary layers.
"""

from collections.abc import Collection, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.linear_modules import is_linear
from lightning_hanayo.runtime.autograd.split_linear import SplitLinear, can_split
from lightning_hanayo.weight_gradients import WeightGradients

_LAYER = "_split_linear"


def patch_linear_layers(blocks: Iterable[nn.Module], queue: WeightGradients, *, keep: Collection[Tensor] = ()) -> None:
    """Let the linear layers of one stage's `blocks` use its `queue`: `nn.Linear` and `Conv1D`, but no subclasses.

    The gradients of the parameters in `keep`, which other stages use too, are made with the input gradients.
    """
    for module in {part: None for block in blocks for part in block.modules()}:
        is_free = _LAYER in vars(module) or "forward" not in vars(module)
        if is_linear(module) and is_free and module.weight not in keep:
            layer = SplitLinear(module, queue, transposed=type(module) is not nn.Linear)
            object.__setattr__(module, _LAYER, layer)
            module.forward = MethodType(forward_transposed if layer.transposed else forward, module)


def unpatch_linear_layers(blocks: Iterable[nn.Module]) -> None:
    """Give the layers their own `forward` back."""
    for block in blocks:
        for module in block.modules():
            if _LAYER in vars(module):
                del vars(module)[_LAYER], module.forward


def forward(module: nn.Module, input: Tensor) -> Any:
    """Replaces `nn.Linear.forward`. Pickle needs the name `forward`, and callers may use the argument's name."""
    return _forward(module, input)


def forward_transposed(module: nn.Module, x: Tensor) -> Any:
    """Replaces `Conv1D.forward`."""
    return _forward(module, x)


forward_transposed.__name__ = "forward"  # pickle looks a method up by this name


def _forward(module: Any, x: Tensor) -> Any:
    layer: SplitLinear | None = module._split_linear
    if layer is None:
        return type(module).forward(module, x)
    if torch.compiler.is_dynamo_compiling():
        uses_queue = layer.trained and torch.is_grad_enabled() and x.ndim > 1
        return layer.call_compiled(x) if uses_queue else type(module).forward(module, x)
    weight = module.weight
    return layer.call(x, weight, module.bias) if can_split(x, weight) else type(module).forward(module, x)
