"""The registry of layers that are parallelized by themselves, wherever they stand in a registered block."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lightning_hanayo.tensor_parallel.convert.block_specs import RMS_NORMS, class_name
from lightning_hanayo.tensor_parallel.layers.attention import attention_sizes, parallelize_attention
from lightning_hanayo.tensor_parallel.layers.norm import (
    Sizes,
    norm_sizes,
    parallelize_dropout,
    parallelize_norm,
    parallelize_rms_norm,
)
from lightning_hanayo.tensor_parallel.stage_context import StageContext

ParallelizeLayer = Callable[[Any, StageContext], None]
"""parallelizes one module in place"""


@dataclass(frozen=True)
class LayerSpec:
    """How one class of layers is parallelized. `sizes` raises an UnsupportedError for a layer that can't be."""

    parallelize: ParallelizeLayer
    sizes: Callable[[Any], Sizes] = lambda module: ()


def elementwise(module: nn.Module, context: StageContext) -> None:
    """For layers that compute each entry from itself alone: they work on any part of a tensor as they are."""


def register_layer(layer: type[nn.Module], parallelize: ParallelizeLayer) -> None:
    """Register a class of layers, which may stand anywhere in a registered block.

    Example:
        >>> register_layer(MyRMSNorm, partial(parallelize_rms_norm, eps=1e-6))
        >>> register_layer(Swish, elementwise)
    """
    _LAYERS[class_name(layer)] = LayerSpec(parallelize)


def layer_spec(module: nn.Module) -> LayerSpec | None:
    """Returns the spec of a layer if exactly its class is registered."""
    spec = _LAYERS.get(class_name(type(module)))
    if spec is None and type(module).__module__ == "transformers.activations" and not list(module.parameters()):
        return LayerSpec(elementwise)
    return spec


def is_elementwise_function(function: Any) -> bool:
    """Returns whether a function is known to compute each entry from itself alone."""
    if isinstance(function, partial):
        return is_elementwise_function(function.func)
    if isinstance(function, nn.Module):
        spec = layer_spec(function)
        return spec is not None and spec.parallelize is elementwise
    return any(function is elementwise_function for elementwise_function in _FUNCTIONS)


_ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink,
)  # fmt: skip

_FUNCTIONS = (
    functional.celu, functional.elu, functional.gelu, functional.hardswish, functional.hardtanh, functional.leaky_relu,
    functional.logsigmoid, functional.mish, functional.relu, functional.relu6, functional.selu, functional.sigmoid,
    functional.silu, functional.softplus, functional.softsign, functional.tanh, torch.relu, torch.selu, torch.sigmoid,
    torch.tanh,
)  # fmt: skip

_LAYERS: dict[str, LayerSpec] = {
    class_name(nn.LayerNorm): LayerSpec(parallelize_norm, norm_sizes),
    class_name(nn.RMSNorm): LayerSpec(parallelize_norm, norm_sizes),
    class_name(nn.Dropout): LayerSpec(parallelize_dropout),
    class_name(nn.MultiheadAttention): LayerSpec(parallelize_attention, attention_sizes),
    **{name: LayerSpec(parallelize_rms_norm, norm_sizes) for name in RMS_NORMS},
    **{class_name(activation): LayerSpec(elementwise) for activation in _ACTIVATIONS},
}
