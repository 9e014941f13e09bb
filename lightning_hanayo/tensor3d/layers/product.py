"""The product: Y = X W^T over the grid, and its two backward products.

forward     X: gathered along y    W: gathered along x    local product    Y: summed along z, a part kept
backward    dY: gathered along z   dX = dY W: summed along y               dW = dY^T X: summed along x

y and z swap in the layout of the next layer. Three gathers and three sums, of 1/(size of the axis) of what a rank works
with each. Paper: algorithms 1 and 2, section 3.1.

    keep = "gathered"     the gathered X and W are saved for the backward
    keep = "shards"       only this rank's shards are saved, and gathered again: 1/(x y z) of everything

    num_pieces = 2        X  |--gather 0--|--gather 1--|                                cut along a dimension that no
                          product         |  0   |     |  1   |                        collective moves (the batch), so
                          Y                      |--sum 0-----|--sum 1-----|            both kinds of work overlap
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hanayo.linear_modules import as_autocast, has_gradient_hooks
from lightning_hanayo.tensor3d.collectives import start_gather, start_scatter
from lightning_hanayo.tensor3d.layers.weight import Weight
from lightning_hanayo.tensor3d.mesh import MeshAxis, Pending

Keep = Literal["gathered", "shards"]


@dataclass(frozen=True)
class Along:
    """A collective of the input or the output: along `axis`, of dimension `dim`; its whole `size`, where known."""

    axis: MeshAxis
    dim: int
    size: int | None = None

    def start_gather(self, x: Tensor) -> Pending:
        """Bring its parts together."""
        return start_gather(x, self.axis, self.dim, self.size)

    def start_scatter(self, x: Tensor) -> Pending:
        """Sum it, and keep a part."""
        return start_scatter(x, self.axis, self.dim)


class Input:
    """A product's input, as it is saved for the backward: gathered, in pieces; or as a shard, to be gathered again.

    Args:
        saved: the pieces, or the shard.
        along: how a shard is gathered; None for what is whole.
    """

    def __init__(self, saved: Sequence[Tensor], along: Along | None) -> None:
        self.saved = saved
        self.along = along
        self._under_way: list[Pending] | None = None

    def start(self) -> None:
        """Begin to gather, ahead of `get`."""
        if self._under_way is None and self.along is not None:
            self._under_way = [self.along.start_gather(shard) for shard in self.saved]

    def get(self) -> list[Tensor]:
        """The whole input, in pieces."""
        self.start()
        under_way, self._under_way = self._under_way, None
        return list(self.saved) if under_way is None else [pending.wait() for pending in under_way]


class Source(Input):
    """An input that several products use: gathered once, and once again for the backward of all of them."""

    def __init__(self, shard: Tensor, along: Along) -> None:
        super().__init__([shard], along)
        self._uses = 0
        self._left = 0
        self._whole: list[Tensor] | None = None

    def use(self) -> "Source":
        """Called by each product's forward."""
        self._uses += 1
        return self

    def start(self) -> None:
        """See `Input`."""
        if self._whole is None:
            super().start()

    def get(self) -> list[Tensor]:
        """Called by each product's backward: the whole input, dropped after the last one."""
        if self._whole is None:
            self._whole, self._left = super().get(), self._uses
        whole, self._left = self._whole, self._left - 1
        if self._left == 0:
            self._whole = None
        return whole


@dataclass(frozen=True)
class Call:
    """One product. `gather` None: the input is whole already, from `source` if several use it; `scatter` None: the
    output is no partial sum."""

    weight: Weight
    gather: Along | None
    scatter: Along | None
    keep: Keep = "gathered"
    source: Source | None = None
    following: Sequence[Weight] = ()
    """gathered ahead, behind this product's compute"""
    num_pieces: int = 1
    """in which the product is played, at most"""

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """`x` cut along a dimension before the last one that no collective moves; whole where there is none."""
        moved = {side.dim % x.dim() for side in (self.gather, self.scatter) if side is not None}
        free = [dim for dim in range(x.dim() - 1) if dim not in moved]
        return x.chunk(self.num_pieces, free[0]) if self.num_pieces > 1 and free else (x,)

    def together(self, pieces: Sequence[Tensor]) -> Tensor:
        """What `pieces` has cut, in its outputs or gradients."""
        if len(pieces) == 1:
            return pieces[0]
        moved = {side.dim % pieces[0].dim() for side in (self.gather, self.scatter) if side is not None}
        return torch.cat(list(pieces), min(set(range(pieces[0].dim() - 1)) - moved))


def product(x: Tensor, call: Call) -> Tensor:
    """X [..., K/z] to Y [..., N/y], both this rank's shards. Called by all ranks of the grid, in the same order.

    Under autocast both are cast before they travel; the output has the cast dtype.
    """
    y: Tensor = _Product.apply(as_autocast(x), call.weight.parameter, call)
    return y


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """[..., K] times [N, K] to [..., N]: all the arithmetic there is in a product's forward."""
    return torch.nn.functional.linear(a, b)


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """[..., N] times [N, K] to [..., K]."""
    return gradient @ weight


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """[..., N] and [..., K] to [N, K]."""
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call) -> Tensor:
        arriving_weight = call.weight.start(x.dtype)
        arriving = [_gather(call.gather, piece) for piece in call.pieces(x)]
        matrix = arriving_weight.wait()
        for following in call.following:
            following.start_ahead(x.dtype)
        wholes, leaving = [], []
        for pending in arriving:
            wholes.append(pending.wait())
            y = multiply(wholes[-1], matrix)
            leaving.append(_scatter(call.scatter, y))
        ctx.call, ctx.source, ctx.dtype = call, None, x.dtype
        ctx.size = None if call.scatter is None else y.shape[call.scatter.dim]
        if call.keep == "gathered":
            ctx.save_for_backward(matrix, *wholes)
        elif call.source is not None:
            ctx.source = call.source.use()
        else:
            ctx.save_for_backward(x)
        return call.together([pending.wait() for pending in leaving])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        needs_x, needs_weight, _ = ctx.needs_input_grad
        back = None if call.scatter is None else replace(call.scatter, size=ctx.size)
        arriving = [_gather(back, piece) for piece in call.pieces(gradient)]
        x, matrix = _saved(ctx, needs_x)
        queue = call.weight.queue
        waits = queue is not None and queue.is_open and not _is_watched(call.weight.parameter)
        if needs_weight and not waits:
            x.start()
        whole, leaving = [], []
        for pending in arriving:
            whole.append(pending.wait())
            if needs_x:
                leaving.append(_scatter(call.gather, input_gradient(whole[-1], matrix.wait())))
        dw = _weight_gradient(call, whole, x, waits=waits) if needs_weight else None
        return call.together([pending.wait() for pending in leaving]) if needs_x else None, dw, None


def _gather(along: Along | None, x: Tensor) -> Pending:
    return Pending(None, lambda: x) if along is None else along.start_gather(x)


def _scatter(along: Along | None, x: Tensor) -> Pending:
    return Pending(None, lambda: x) if along is None else along.start_scatter(x)


def _saved(ctx: Any, needs_weight_itself: bool) -> tuple[Input, Pending]:
    """The input, and the weight, which is on its way if it is needed."""
    call: Call = ctx.call
    if call.keep == "gathered":
        matrix, *wholes = ctx.saved_tensors
        return Input(wholes, None), Pending(None, lambda: matrix)
    x = ctx.source if ctx.source is not None else Input(call.pieces(ctx.saved_tensors[0]), call.gather)
    if not needs_weight_itself:
        return x, Pending(None, lambda: call.weight.parameter)
    return x, Pending(None, cache(call.weight.start(ctx.dtype).wait))


def _is_watched(parameter: Tensor) -> bool:
    """Whether somebody wants the gradient as autograd hands it on: hooks, or `autograd.grad` within a block."""
    return not parameter.is_leaf or has_gradient_hooks(parameter) or not torch.autograd._is_checkpoint_valid()


def _weight_gradient(call: Call, gradient: list[Tensor], x: Input, *, waits: bool) -> Tensor | None:
    """Left to the stage's queue if that is open; else made now, its sum under way until the backward's end."""
    weight = call.weight
    if len(gradient) > 1 and isinstance(x, Source):
        gradient = [call.together(gradient)]
    if waits:
        assert weight.queue is not None
        operands = gradient if isinstance(x, Source) else [*gradient, *x.saved]
        weight.queue.put(weight.parameter, lambda *dy: _make(dy[: len(gradient)], x, weight), *operands)
        return None
    made = _make(gradient, x, weight)
    if _is_watched(weight.parameter):
        return made.wait()
    weight.late.add(weight.parameter, made)
    return None


def _make(gradient: Sequence[Tensor], x: Input, weight: Weight) -> Pending:
    total: Tensor | None = None
    for dy, part in zip(gradient, x.get(), strict=True):
        product = weight_gradient(dy, part)
        total = product if total is None else total.add_(product)
    assert total is not None
    return weight.start_sum(total)
