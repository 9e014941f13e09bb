"""Quantized weights are found, taken apart, and sent as bytes."""

from types import SimpleNamespace

import torch
from torch import nn

from lightning_hanayo.linear_modules import is_linear
from lightning_hanayo.packed_values import from_bytes, inner_tensors, is_packed, stored_tensors, to_bytes
from tests.harness.quantized import Quantized


class Packed(nn.Parameter):
    """As bitsandbytes': integers, with what they mean in an attribute."""


def packed() -> Packed:
    parameter = Packed(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    parameter.quant_state = SimpleNamespace(absmax=torch.ones(2), state2=SimpleNamespace(absmax=torch.ones(1)))  # type: ignore[attr-defined]
    return parameter


def test_quantized_parameters_are_packed_and_ordinary_ones_are_not() -> None:
    quantized = nn.Parameter(Quantized.of(torch.randn(4, 2)), requires_grad=False)
    assert is_packed(quantized) and is_packed(packed())
    assert not is_packed(nn.Parameter(torch.zeros(2))) and not is_packed(
        nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    )


def test_a_linear_layer_with_a_quantized_weight_is_left_alone() -> None:
    layer = nn.Linear(2, 4)
    assert is_linear(layer)
    layer.weight = nn.Parameter(Quantized.of(layer.weight), requires_grad=False)
    assert not is_linear(layer)


def test_all_tensors_with_values_are_found() -> None:
    quantized = Quantized.of(torch.randn(4, 2))
    assert [tuple(one.shape) for one in inner_tensors(quantized)] == [(4, 2), (4, 1)]
    assert [tuple(one.shape) for one in stored_tensors(packed())] == [(4, 1), (2,), (1,)]


def test_a_quantized_weight_comes_back_from_bytes() -> None:
    quantized = Quantized.of(torch.randn(4, 2))
    again = from_bytes(to_bytes(quantized))
    assert isinstance(again, Quantized)
    assert torch.equal(again.codes, quantized.codes) and torch.equal(again.scales, quantized.scales)
