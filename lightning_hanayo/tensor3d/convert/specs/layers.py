"""The layers: kinds that are spread by themselves, wherever in a block of a known kind they stand."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lightning_hanayo.tensor3d.convert.specs import llama
from lightning_hanayo.tensor3d.convert.specs.spec import class_name
from lightning_hanayo.tensor3d.layers.attention import spread_attention
from lightning_hanayo.tensor3d.layers.dropout import spread_dropout
from lightning_hanayo.tensor3d.layers.norm import spread_norm, spread_rms_norm
from lightning_hanayo.tensor3d.stage_context import StageContext

SpreadModule = Callable[[Any, StageContext], None]
"""spreads one module over the grid, in place"""

Sizes = tuple[tuple[str, int, str], ...]
"""what must divide: what it is, how many, along which axes"""


@dataclass(frozen=True)
class LayerSpec:
    """How a class of layers is spread, what of it must divide, and why one can't be spread, if so."""

    spread: SpreadModule
    sizes: Callable[[Any], Sizes] = lambda module: ()
    obstacle: Callable[[Any], str | None] = lambda module: None


def leave(module: nn.Module, setting: StageContext) -> None:
    """For layers that compute each entry from the same entry alone: they work on any part of a tensor as they are."""


def _norm_sizes(module: Any) -> Sizes:
    shape = module.normalized_shape if hasattr(module, "normalized_shape") else module.weight.shape
    return (("features", shape[-1], "z"),)


def _norm_obstacle(module: Any) -> str | None:
    return "it normalises over several dimensions" if len(module.normalized_shape) > 1 else None


def _attention_sizes(module: nn.MultiheadAttention) -> Sizes:
    inputs = {"query": module.embed_dim, "key": module.kdim, "value": module.vdim}
    features = tuple((f"features of a {name}", size, "z") for name, size in inputs.items())
    return (("heads", module.num_heads, "yz"), ("features", module.embed_dim, "xy"), *features)


def _attention_obstacle(module: nn.MultiheadAttention) -> str | None:
    return "it adds keys of its own" if module.bias_k is not None or module.add_zero_attn else None


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

LAYERS: dict[str, LayerSpec] = {
    class_name(nn.LayerNorm): LayerSpec(spread_norm, _norm_sizes, _norm_obstacle),
    class_name(nn.RMSNorm): LayerSpec(spread_norm, _norm_sizes, _norm_obstacle),
    class_name(nn.Dropout): LayerSpec(spread_dropout),
    class_name(nn.MultiheadAttention): LayerSpec(spread_attention, _attention_sizes, _attention_obstacle),
    **{name: LayerSpec(spread_rms_norm, _norm_sizes) for name in llama.NORMS},
    **{class_name(kind): LayerSpec(leave) for kind in _ACTIVATIONS},
}


def layer_kind(module: nn.Module) -> LayerSpec | None:
    """The kind of a layer, if it has one: exactly its class counts."""
    known = LAYERS.get(class_name(type(module)))
    if known is None and type(module).__module__ == "transformers.activations" and not list(module.parameters()):
        return LayerSpec(leave)
    return known


def works_on_parts(function: Any) -> bool:
    """Whether a function is known to compute each entry from the same entry alone."""
    if isinstance(function, partial):
        return works_on_parts(function.func)
    if isinstance(function, nn.Module):
        known = layer_kind(function)
        return known is not None and known.spread is leave
    return any(function is known for known in _FUNCTIONS)
