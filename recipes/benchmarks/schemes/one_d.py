"""1-D (Megatron): the first layer of a pair is column-parallel, the second row-parallel.

sequence form       x [M/P, h] -all-gather-> column -> [M, n/P] -> row -reduce-scatter-> [M/P, h]
all-reduce form     x [M, h]                 column -> [M, n/P] -> row -all-reduce->     [M, h]

The input gradient of the column-parallel layer is summed while its weight gradient is computed; what was gathered is
kept. 4 (P-1)/P Mh per pair, forward and backward, in either form.
"""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.tensor_parallel import product as arithmetic
from lightning_hanayo.tensor_parallel.mesh import MeshAxis
from recipes.benchmarks.schemes.layer import Scheme


class OneD(Scheme):
    """All ranks of `axis`.

    Args:
        axis: the ranks.
        by_sequence: whether it is the sequence form.
    """

    def __init__(self, axis: MeshAxis, *, by_sequence: bool) -> None:
        self._axis = axis
        self._by_sequence = by_sequence

    @override
    def linear(self, index: int, weight: Tensor) -> nn.Module:
        return _Cut(
            self.cut_weight(index, weight),
            _RowParallel if index % 2 else _ColumnParallel,
            self._axis,
            self._by_sequence,
        )

    @override
    def cut(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        return (rows.chunk(self._axis.size)[self._axis.rank] if self._by_sequence else rows).clone()

    @override
    def cut_weight(self, index: int, weight: Tensor) -> Tensor:
        return weight.chunk(self._axis.size, index % 2)[self._axis.rank].contiguous()


class _Cut(nn.Module):
    def __init__(self, weight: Tensor, function: Any, axis: MeshAxis, by_sequence: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._function, self._axis, self._by_sequence = function, axis, by_sequence

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._function.apply(x, self.weight, self._axis, self._by_sequence)
        return y


def _gathered(x: Tensor, axis: MeshAxis) -> Tensor:
    """[m, n] of each to [P m, n]."""
    return axis.all_gather(x).wait().flatten(0, 1)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: MeshAxis, by_sequence: bool) -> Tensor:
        whole = _gathered(x, axis) if by_sequence else x
        ctx.save_for_backward(whole, weight)
        ctx.axis, ctx.by_sequence = axis, by_sequence
        return arithmetic.multiply(whole, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole, weight = ctx.saved_tensors
        dx = arithmetic.input_gradient(gradient, weight)
        if ctx.by_sequence:
            pending = ctx.axis.reduce_scatter(dx.unflatten(0, (ctx.axis.size, -1)))
        else:
            pending = ctx.axis.all_reduce(dx)
        dw = arithmetic.weight_gradient(gradient, whole)
        return pending.wait(), dw, None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: MeshAxis, by_sequence: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.by_sequence = axis, by_sequence
        y = arithmetic.multiply(x, weight)
        if by_sequence:
            return axis.reduce_scatter(y.unflatten(0, (axis.size, -1))).wait()
        return axis.all_reduce(y).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole = _gathered(gradient, ctx.axis) if ctx.by_sequence else gradient
        return arithmetic.input_gradient(whole, weight), arithmetic.weight_gradient(whole, x), None, None
