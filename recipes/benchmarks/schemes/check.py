"""Checks with real products that every scheme's output and gradients equal those of whole layers."""

import torch
from torch import Tensor, nn

from recipes.benchmarks.schemes.device import Device
from recipes.benchmarks.schemes.layer import Layer, WholeLinear, shapes
from recipes.benchmarks.schemes.log import Log
from recipes.benchmarks.schemes.names import Find, make

HIDDEN, BATCH, SEQ, LAYERS = 16, 8, 8, 2


def check(name: str, hosts: int, rank: int, find: Find) -> float:
    """Returns the largest error of this host's parts, relative to the largest value, in fp64. Called by all hosts."""
    torch.manual_seed(0)
    weights = [[torch.randn(shape).double() / HIDDEN**0.5 for shape in shapes(HIDDEN)] for _ in range(LAYERS)]
    x, gradient = torch.randn(2, BATCH, SEQ, HIDDEN).double().unbind()
    reference = nn.Sequential(*(Layer([WholeLinear(one) for one in four], Device(), SEQ) for four in weights))
    scheme = make(name, hosts, rank, find, Log())
    model = scheme.layers(weights, Device(), SEQ)
    whole_x, own_x = x.clone().requires_grad_(), scheme.cut(x).requires_grad_()
    whole_y, own_y = reference(whole_x), model(own_x)
    whole_y.backward(gradient)
    own_y.backward(scheme.cut(gradient))
    errors = [_error(own_y, scheme.cut(whole_y.detach())), _error(own_x.grad, scheme.cut(_of(whole_x)))]
    for index, (own, whole) in enumerate(zip(model.parameters(), reference.parameters(), strict=True)):
        errors.append(_error(own.grad, scheme.cut_weight(index % 4, _of(whole))))
    return max(errors)


def _of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _error(actual: Tensor | None, expected: Tensor) -> float:
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    return float((actual.detach() - expected).abs().max() / expected.abs().max())
