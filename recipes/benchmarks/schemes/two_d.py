"""2-D (SUMMA): q x q ranks, each with a block of every matrix; panels are sent along rows and columns.

Y[i,j]  = sum over l of X[i,l] W[j,l]^T       X[i,l] to its row, W[j,l] to its column
dX[i,l] = sum over j of dY[i,j] W[j,l]        W[j,l] to its column, the parts of the sum over the row to l
dW[j,l] = sum over i of dY[i,j]^T X[i,l]      X[i,l] to its row, the parts of the sum over the column to l

W[j,l] of torch's [N, K] is stored on rank (l, j). In the usual form all ranks take l = 0, 1, .. and receive the next
panels while these are multiplied. Here all panels are sent at once, each rank begins with its own block of X, and the
backward begins with the others' parts, so that no link is idle while another is busy: more memory, the same volume,
3 (q-1)/q^2 (MK + KN).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.tensor_parallel import product as arithmetic
from lightning_hanayo.tensor_parallel.mesh import Pending
from recipes.benchmarks.schemes.layer import Scheme
from recipes.benchmarks.schemes.wire import Wire


class TwoD(Scheme):
    """Args:
    row: this rank's row i: the ranks (i, 0), (i, 1), ...
    column: its column j.
    """

    def __init__(self, row: Wire, column: Wire) -> None:
        self._row, self._column = row, column

    @override
    def linear(self, index: int, weight: Tensor) -> nn.Module:
        return _Block(self.cut_weight(index, weight), self._row, self._column)

    @override
    def cut(self, x: Tensor) -> Tensor:
        return self._block(x.flatten(0, 1), self._column.rank, self._row.rank)

    @override
    def cut_weight(self, index: int, weight: Tensor) -> Tensor:
        return self._block(weight, self._row.rank, self._column.rank)

    def _block(self, whole: Tensor, row: int, column: int) -> Tensor:
        return whole.chunk(self._row.size)[row].chunk(self._row.size, 1)[column].contiguous()


class _Block(nn.Module):
    def __init__(self, weight: Tensor, row: Wire, column: Wire) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._row, self._column = row, column

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Summa.apply(x, self.weight, self._row, self._column)
        return y


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, row: Wire, column: Wire) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.row, ctx.column = row, column
        panels = [row.rank + step for step in range(row.size)]
        y: Tensor | None = None
        for a, b in zip(_along(row, x, panels), _along(column, weight, panels), strict=True):
            part = arithmetic.multiply(a, b)
            y = part if y is None else y.add_(part)
        assert y is not None
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        row, column = ctx.row, ctx.column
        steps = [*range(1, row.size), 0]
        weights = _along(column, weight, [row.rank + step for step in steps])
        inputs = _along(row, x, [column.rank + step for step in steps])
        dx, dw = [], []
        for step, b, a in zip(steps, weights, inputs, strict=True):
            dx.append(row.shift(arithmetic.input_gradient(gradient, b), -step))
            dw.append(column.shift(arithmetic.weight_gradient(gradient, a), -step))
        return _sum(dx), _sum(dw), None, None


def _sum(parts: list[Pending[Tensor]]) -> Tensor:
    total = parts[0].wait()
    for part in parts[1:]:
        total.add_(part.wait())
    return total


def _along(axis: Wire, own: Tensor, ranks: list[int]) -> Iterator[Tensor]:
    """Returns the blocks of these ranks in this order. All are requested at once."""
    own = own.detach().contiguous()
    pending = [axis.shift(own, rank - axis.rank) for rank in ranks]
    return (panel.wait() for panel in pending)
