"""The 3-D parallel matrix product Y = X W^T, and its two backward products.

forward     X: all-gathered along y     W: all-gathered along x     local product     Y: reduce-scattered along z
backward    dY: all-gathered along z    dX = dY W: reduce-scattered along y    dW = dY^T X: reduce-scattered along x

In a row-parallel layer y and z trade roles. Each of the three all-gathers starts from 1/(size of its axis) of what a
rank multiplies, each of the three reduce-scatters ends with it. Source: arXiv 2105.14450, algorithms 1 and 2, section
3.1.

    keep = "gathered"     the gathered X and W are saved for the backward
    keep = "shards"       only this rank's shards are saved, 1/(x y z) of everything, and gathered again

    num_pieces = 2        X  |--gather 0--|--gather 1--|                                cut along a dimension that no
                          product         |  0   |     |  1   |                         collective touches (the batch):
                          Y                      |--sum 0-----|--sum 1-----|            communication overlaps compute
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hanayo.linear_modules import as_autocast, has_gradient_hooks
from lightning_hanayo.tensor3d.collectives import start_all_gather, start_reduce_scatter
from lightning_hanayo.tensor3d.mesh import MeshAxis, Pending
from lightning_hanayo.tensor3d.sharded_weight import ShardedWeight

Keep = Literal["gathered", "shards"]
"""what a product saves for its backward"""


@dataclass(frozen=True)
class BoundCollective:
    """A collective of an input's or output's dimension `dim`, whose true length is `size` if its parts are padded."""

    axis: MeshAxis
    dim: int
    size: int | None = None

    def start_all_gather(self, x: Tensor) -> Pending:
        """Start to gather the parts."""
        return start_all_gather(x, self.axis, self.dim, self.size)

    def start_reduce_scatter(self, x: Tensor) -> Pending:
        """Start to sum; each rank gets its part."""
        return start_reduce_scatter(x, self.axis, self.dim)


class SavedInput:
    """A product's input as it is saved for the backward: gathered, in pieces, or shards that `collective` gathers."""

    def __init__(self, saved: Sequence[Tensor], collective: BoundCollective | None) -> None:
        self.saved = saved
        self.collective = collective
        self._pending: list[Pending] | None = None

    def start(self) -> None:
        """Start to gather, before `get` needs the result."""
        if self._pending is None and self.collective is not None:
            self._pending = [self.collective.start_all_gather(shard) for shard in self.saved]

    def get(self) -> list[Tensor]:
        """Returns the gathered input, in pieces."""
        self.start()
        pending, self._pending = self._pending, None
        return list(self.saved) if pending is None else [one.wait() for one in pending]


class SharedSavedInput(SavedInput):
    """A shard of an input that several products read: gathered once, and once again for the backward of all of them."""

    def __init__(self, shard: Tensor, collective: BoundCollective) -> None:
        super().__init__([shard], collective)
        self._num_uses = 0
        self._num_left = 0
        self._gathered: list[Tensor] | None = None

    def use(self) -> "SharedSavedInput":
        """Called by each product's forward."""
        self._num_uses += 1
        return self

    def start(self) -> None:
        """Start to gather, unless the backward of another product already has."""
        if self._gathered is None:
            super().start()

    def get(self) -> list[Tensor]:
        """Called by each product's backward. The gathered input is freed after the last one."""
        if self._gathered is None:
            self._gathered, self._num_left = super().get(), self._num_uses
        gathered, self._num_left = self._gathered, self._num_left - 1
        if self._num_left == 0:
            self._gathered = None
        return gathered


@dataclass(frozen=True)
class ProductArgs:
    """What one product needs besides its input.

    Args:
        weight: W.
        all_gather: of the input; None: it is gathered already.
        reduce_scatter: of the output; None: it is no partial sum.
        keep: what is saved for the backward.
        shared_input: what is saved of an input that several products read.
        prefetch: weights that are gathered while this product computes.
        num_pieces: in how many pieces the product runs, at most.
    """

    weight: ShardedWeight
    all_gather: BoundCollective | None
    reduce_scatter: BoundCollective | None
    keep: Keep = "gathered"
    shared_input: SharedSavedInput | None = None
    prefetch: Sequence[ShardedWeight] = ()
    num_pieces: int = 1

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Cut `x` along a dimension before the last one that no collective touches; whole if there is none."""
        touched = self._touched_dims(x)
        free = [dim for dim in range(x.dim() - 1) if dim not in touched]
        return x.chunk(self.num_pieces, free[0]) if self.num_pieces > 1 and free else (x,)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join what `split` has cut: the pieces of an output or of a gradient."""
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(list(pieces), min(set(range(pieces[0].dim() - 1)) - self._touched_dims(pieces[0])))

    def _touched_dims(self, x: Tensor) -> set[int]:
        return {one.dim % x.dim() for one in (self.all_gather, self.reduce_scatter) if one is not None}


def product(x: Tensor, args: ProductArgs) -> Tensor:
    """X [..., K/z] to Y [..., N/y], both this rank's shards. Called by all ranks of the mesh, in the same order.

    Under autocast X and W are cast before they are sent, and the output has the cast dtype.
    """
    y: Tensor = _Product.apply(as_autocast(x), args.weight.parameter, args)
    return y


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """[..., K] times [N, K] to [..., N]: all the arithmetic of a product's forward."""
    return torch.nn.functional.linear(a, b)


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """[..., N] times [N, K] to [..., K]."""
    return gradient @ weight


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """[..., N] and [..., K] to [N, K]."""
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, args: ProductArgs) -> Tensor:
        pending_weight = args.weight.start_all_gather(x.dtype)
        pending_inputs = [_all_gather(args.all_gather, piece) for piece in args.split(x)]
        matrix = pending_weight.wait()
        for following in args.prefetch:
            following.prefetch(x.dtype)
        gathered, pending_outputs = [], []
        for pending in pending_inputs:
            gathered.append(pending.wait())
            y = multiply(gathered[-1], matrix)
            pending_outputs.append(_reduce_scatter(args.reduce_scatter, y))
        ctx.args, ctx.shared_input, ctx.dtype = args, None, x.dtype
        ctx.size = None if args.reduce_scatter is None else y.shape[args.reduce_scatter.dim]
        if args.keep == "gathered":
            ctx.save_for_backward(matrix, *gathered)
        elif args.shared_input is not None:
            ctx.shared_input = args.shared_input.use()
        else:
            ctx.save_for_backward(x)
        return args.join([pending.wait() for pending in pending_outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        args: ProductArgs = ctx.args
        needs_x, needs_weight, _ = ctx.needs_input_grad
        of_output = None if args.reduce_scatter is None else replace(args.reduce_scatter, size=ctx.size)
        pending_gradients = [_all_gather(of_output, piece) for piece in args.split(gradient)]
        x, matrix = _saved(ctx, needs_x)
        queue = args.weight.queue
        is_deferred = queue is not None and queue.is_open and not _is_watched(args.weight.parameter)
        if needs_weight and not is_deferred:
            x.start()
        gathered, pending_outputs = [], []
        for pending in pending_gradients:
            gathered.append(pending.wait())
            if needs_x:
                pending_outputs.append(_reduce_scatter(args.all_gather, input_gradient(gathered[-1], matrix.wait())))
        dw = _weight_gradient(args, gathered, x, is_deferred=is_deferred) if needs_weight else None
        return args.join([pending.wait() for pending in pending_outputs]) if needs_x else None, dw, None


def _all_gather(collective: BoundCollective | None, x: Tensor) -> Pending:
    return Pending.done(x) if collective is None else collective.start_all_gather(x)


def _reduce_scatter(collective: BoundCollective | None, x: Tensor) -> Pending:
    return Pending.done(x) if collective is None else collective.start_reduce_scatter(x)


def _saved(ctx: Any, needs_matrix: bool) -> tuple[SavedInput, Pending]:
    """Returns the input, and the weight, whose all-gather is under way if it is needed."""
    args: ProductArgs = ctx.args
    if args.keep == "gathered":
        matrix, *gathered = ctx.saved_tensors
        return SavedInput(gathered, None), Pending.done(matrix)
    x = ctx.shared_input or SavedInput(args.split(ctx.saved_tensors[0]), args.all_gather)
    if not needs_matrix:
        return x, Pending.done(args.weight.parameter)
    return x, Pending(None, cache(args.weight.start_all_gather(ctx.dtype).wait))


def _is_watched(parameter: Tensor) -> bool:
    """Whether somebody wants the gradient as autograd hands it on: hooks, or `autograd.grad` within a block."""
    return not parameter.is_leaf or has_gradient_hooks(parameter) or not torch.autograd._is_checkpoint_valid()


def _weight_gradient(args: ProductArgs, gradient: list[Tensor], x: SavedInput, *, is_deferred: bool) -> Tensor | None:
    """Leave the product to the stage's queue, or compute it now and sum it until the backward ends."""
    weight = args.weight
    is_shared = isinstance(x, SharedSavedInput)
    if len(gradient) > 1 and is_shared:
        gradient = [args.join(gradient)]
    if is_deferred:
        assert weight.queue is not None
        operands = gradient if is_shared else [*gradient, *x.saved]
        weight.queue.put(weight.parameter, lambda *dy: _compute(dy[: len(gradient)], x, weight), *operands)
        return None
    computed = _compute(gradient, x, weight)
    if _is_watched(weight.parameter):
        return computed.wait()
    weight.pending_gradients.add(weight.parameter, computed)
    return None


def _compute(gradient: Sequence[Tensor], x: SavedInput, weight: ShardedWeight) -> Pending:
    total: Tensor | None = None
    for dy, part in zip(gradient, x.get(), strict=True):
        dw = weight_gradient(dy, part)
        total = dw if total is None else total.add_(dw)
    assert total is not None
    return weight.start_reduce_scatter(total)
