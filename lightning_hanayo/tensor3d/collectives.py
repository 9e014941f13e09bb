"""Collectives as autograd functions: the backward of each is the collective that undoes it.

                         forward                                            backward
all_gather               [.., n, ..] each       -> [.., size * n, ..]       reduce-scatter
reduce_scatter           [.., size * n, ..]     -> [.., n, ..]              all-gather
all_to_all               [size, ...] for each   -> [size, ...] from each    all-to-all
local_shard              [.., size * n, ..]     -> own [.., n, ..]          all-gather
all_gather_replicated    [.., n, ..] each       -> [.., size * n, ..]       own part
all_reduce               partial sums           -> their sum                the same gradient on all ranks

After `all_gather` each rank computes something else, so its gradients are partial sums. After `all_gather_replicated`,
and before `local_shard`, all ranks compute the same, so gradients are equal and nothing is summed.

The argument `size` is the true length of the dimension: parts of unequal length were padded to one length.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lightning_hanayo.tensor3d.mesh import MeshAxis, Pending


def start_all_gather(x: Tensor, axis: MeshAxis, dim: int, size: int | None = None) -> Pending:
    """Start to gather the parts of dimension `dim` along `axis`."""
    if axis.size == 1:
        return Pending(None, lambda: x)
    pending, dim = axis.all_gather(x), dim % x.dim()
    return Pending(None, lambda: _joined(pending.wait(), dim, size))


def start_reduce_scatter(x: Tensor, axis: MeshAxis, dim: int) -> Pending:
    """Start to sum over `axis`. Each rank gets its part of dimension `dim`, which is padded to equal parts."""
    if axis.size == 1:
        return Pending(None, lambda: x)
    return axis.reduce_scatter(split_dim(x, axis.size, dim))


def split_dim(x: Tensor, count: int, dim: int) -> Tensor:
    """[.., count * n, ..] to [count, .., n, ..], contiguous; padded with zeros where `count` doesn't divide."""
    dim %= x.dim()
    x = padded(x, dim, -(-x.shape[dim] // count) * count)
    parts: Tensor = x.unflatten(dim, (count, -1)).movedim(dim, 0).contiguous()
    return parts


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Returns `x` with zeros appended in `dim`, up to `size`."""
    missing = size - x.shape[dim]
    return pad(x, (*(0, 0) * (x.dim() - 1 - dim), 0, missing)) if missing else x


def _joined(parts: Tensor, dim: int, size: int | None) -> Tensor:
    """[count, .., n, ..] to [.., count * n, ..], or to the first `size` of it."""
    whole: Tensor = parts.movedim(0, dim).flatten(dim, dim + 1)
    if size is not None and size < whole.shape[dim]:
        whole = whole.narrow(dim, 0, size)
    return whole


def all_gather(x: Tensor, axis: MeshAxis, dim: int, size: int | None = None) -> Tensor:
    """Gather dimension `dim` for ranks that compute different things with it."""
    return x if axis.size == 1 else _AllGather.apply(x, axis, dim, size)


def reduce_scatter(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Sum over `axis`, and return this rank's part of dimension `dim` of the sum."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, dim)


def all_to_all(parts: Tensor, axis: MeshAxis) -> Tensor:
    """[size, ...], whose i-th part goes to rank i, to [size, ...], whose i-th part came from rank i."""
    received: Tensor = parts if axis.size == 1 else _AllToAll.apply(parts, axis)
    return received


def local_shard(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Return this rank's part of dimension `dim` of a tensor that is the same on all ranks."""
    return x if axis.size == 1 else _LocalShard.apply(x, axis, dim)


def all_gather_replicated(x: Tensor, axis: MeshAxis, dim: int, size: int | None = None) -> Tensor:
    """Gather dimension `dim` for ranks that all compute the same with it."""
    return x if axis.size == 1 else _AllGatherReplicated.apply(x, axis, dim, size)


def all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """Sum over `axis` for ranks that all compute the same with the sum."""
    return x if axis.size == 1 else _AllReduce.apply(x, axis)


def _own_part(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    return split_dim(x, axis.size, dim)[axis.rank].clone()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int, size: int | None) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return start_all_gather(x, axis, dim, size).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return start_reduce_scatter(gradient, ctx.axis, ctx.dim).wait(), None, None, None


class _AllGatherReplicated(_AllGather):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _own_part(gradient, ctx.axis, ctx.dim), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.size = axis, dim, x.shape[dim]
        return start_reduce_scatter(x, axis, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return start_all_gather(gradient, ctx.axis, ctx.dim, ctx.size).wait(), None, None


class _LocalShard(_ReduceScatter):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.size = axis, dim, x.shape[dim]
        return _own_part(x, axis, dim)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return axis.all_to_all(parts).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.all_to_all(gradient).wait(), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        return axis.all_reduce(x.clone(memory_format=torch.contiguous_format)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None
