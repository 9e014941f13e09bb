"""The moves: collectives as pairs, one the backward of the other.

gather      [.., n, ..] of each        -> [.., size * n, ..]         backward: the sum, scattered
scatter     [.., size * n, ..] summed  -> [.., n, ..]                backward: gathered
exchange    [size, ...] for each           -> [size, ...] from each      backward: exchanged back
take        [.., size * n, ..]         -> own [.., n, ..]            backward: put together
assemble    [.., n, ..] of each        -> [.., size * n, ..]         backward: own part
total       partial sums               -> their sum                  backward: the same on all

`size`, where it is given, is the true length of the dimension: what lies beyond it pads the parts to one length.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lightning_hanayo.tensor3d.mesh import MeshAxis, Pending


def start_gather(x: Tensor, axis: MeshAxis, dim: int, size: int | None = None) -> Pending:
    """Start to bring the parts of dimension `dim` together."""
    if axis.size == 1:
        return Pending(None, lambda: x)
    arriving, dim = axis.all_gather(x), dim % x.dim()
    return Pending(None, lambda: _joined(arriving.wait(), dim, size))


def start_scatter(x: Tensor, axis: MeshAxis, dim: int) -> Pending:
    """Start to sum over `axis`; each rank gets its part of dimension `dim`, which is padded to whole parts."""
    if axis.size == 1:
        return Pending(None, lambda: x)
    return axis.reduce_scatter(parts_of(x, axis.size, dim))


def parts_of(x: Tensor, count: int, dim: int) -> Tensor:
    """[.., count * n, ..] as [count, .., n, ..], contiguous; padded with zeros where `count` doesn't divide."""
    dim %= x.dim()
    x = padded(x, dim, -(-x.shape[dim] // count) * count)
    parts: Tensor = x.unflatten(dim, (count, -1)).movedim(dim, 0).contiguous()
    return parts


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` with zeros behind it in `dim`, up to `size`."""
    missing = size - x.shape[dim]
    return pad(x, (*(0, 0) * (x.dim() - 1 - dim), 0, missing)) if missing else x


def _joined(parts: Tensor, dim: int, size: int | None) -> Tensor:
    """[count, .., n, ..] as [.., count * n, ..], or the first `size` of it."""
    whole: Tensor = parts.movedim(0, dim).flatten(dim, dim + 1)
    if size is not None and size < whole.shape[dim]:
        whole = whole.narrow(dim, 0, size)
    return whole


def gather(x: Tensor, axis: MeshAxis, dim: int, size: int | None = None) -> Tensor:
    """All parts of dimension `dim` on every rank, each of which uses them for something else."""
    return x if axis.size == 1 else _Gather.apply(x, axis, dim, size)


def scatter(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """The sum over `axis`, of which each rank gets its part of dimension `dim`."""
    return x if axis.size == 1 else _Scatter.apply(x, axis, dim)


def exchange(parts: Tensor, axis: MeshAxis) -> Tensor:
    """[size, ...], the i-th for rank i, to the i-th from rank i."""
    exchanged: Tensor = parts if axis.size == 1 else _Exchange.apply(parts, axis)
    return exchanged


def take(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """This rank's part of what all ranks hold alike, and go on with."""
    return x if axis.size == 1 else _Take.apply(x, axis, dim)


def assemble(x: Tensor, axis: MeshAxis, dim: int, size: int | None = None) -> Tensor:
    """All parts of dimension `dim`, with which all ranks go on alike."""
    return x if axis.size == 1 else _Assemble.apply(x, axis, dim, size)


def total(x: Tensor, axis: MeshAxis) -> Tensor:
    """The sum of partial sums, with which all ranks go on alike."""
    return x if axis.size == 1 else _Total.apply(x, axis)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int, size: int | None) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return start_gather(x, axis, dim, size).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return start_scatter(gradient, ctx.axis, ctx.dim).wait(), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.size = axis, dim, x.shape[dim]
        return start_scatter(x, axis, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return start_gather(gradient, ctx.axis, ctx.dim, ctx.size).wait(), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return axis.all_to_all(parts).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.all_to_all(gradient).wait(), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.size = axis, dim, x.shape[dim]
        return parts_of(x, axis.size, dim)[axis.place].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return start_gather(gradient, ctx.axis, ctx.dim, ctx.size).wait(), None, None


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int, size: int | None) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return start_gather(x, axis, dim, size).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return parts_of(gradient, ctx.axis.size, ctx.dim)[ctx.axis.place].clone(), None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        return axis.all_reduce(x.clone(memory_format=torch.contiguous_format)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None
