"""The product: Y = X W^T over the grid, and its two backward products.

forward     X: gathered along y    W: gathered along x    local product    Y: summed along z, a part kept
backward    dY: gathered along z   dX = dY W: summed along y               dW = dY^T X: summed along x

y and z swap in the layout of the next layer. Three gathers and three sums, of 1/(size of the axis) of what a rank works
with each. Paper: algorithms 1 and 2, section 3.1.

    keep = "gathered"     the gathered X and W are saved for the backward
    keep = "shards"       only this rank's shards are saved, and gathered again: 1/(x y z) of everything
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hanayo.tensor3d.grid import Axis, Pending
from lightning_hanayo.tensor3d.moves import start_gather, start_scatter
from lightning_hanayo.tensor3d.weight import Weight

Keep = Literal["gathered", "shards"]


@dataclass(frozen=True)
class Along:
    """A collective of the input or the output: along `axis`, of dimension `dim`; its whole `size`, where known."""

    axis: Axis
    dim: int
    size: int | None = None

    def start_gather(self, x: Tensor) -> Pending:
        """Bring its parts together."""
        return start_gather(x, self.axis, self.dim, self.size)

    def start_scatter(self, x: Tensor) -> Pending:
        """Sum it, and keep a part."""
        return start_scatter(x, self.axis, self.dim)


class Source:
    """An input that several products use: gathered once, and once again for the backward of all of them."""

    def __init__(self, shard: Tensor, along: Along) -> None:
        self.shard = shard
        self.along = along
        self._uses = 0
        self._left = 0
        self._whole: Tensor | None = None

    def use(self) -> "Source":
        """Called by each product's forward."""
        self._uses += 1
        return self

    def get(self) -> Tensor:
        """Called by each product's backward: the whole input, dropped after the last one."""
        if self._whole is None:
            self._whole, self._left = self.along.start_gather(self.shard).wait(), self._uses
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
    following: Weight | None = None
    """gathered ahead, behind this product's compute"""


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


def as_autocast(x: Tensor) -> Tensor:
    """`x` as autocast would hand it to a matrix product; double precision it leaves alone."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype is torch.float64 or not x.is_floating_point():
        return x
    return x.to(torch.get_autocast_dtype(device))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call) -> Tensor:
        whole_weight = call.weight.start(x.dtype)
        whole = x if call.gather is None else call.gather.start_gather(x).wait()
        matrix = whole_weight.wait()
        if call.following is not None:
            call.following.start_ahead(x.dtype)
        y = multiply(whole, matrix)
        out = y if call.scatter is None else call.scatter.start_scatter(y).wait()
        ctx.call, ctx.source, ctx.dtype, ctx.size = call, None, x.dtype, y.shape
        if call.keep == "gathered":
            ctx.save_for_backward(whole, matrix)
        elif call.source is not None:
            ctx.source = call.source.use()
        else:
            ctx.save_for_backward(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        needs_x, needs_weight, _ = ctx.needs_input_grad
        arriving = _start_output_gradient(call, gradient, ctx.size)
        saved = ctx.saved_tensors
        kept = call.keep == "gathered"
        matrix = Pending(None, lambda: saved[1]) if kept or not needs_x else call.weight.start(ctx.dtype)
        whole = arriving.wait()
        leaving = None
        if needs_x:
            dx = input_gradient(whole, matrix.wait())
            leaving = Pending(None, lambda: dx) if call.gather is None else call.gather.start_scatter(dx)
        dw = None
        if needs_weight:
            x = ctx.source if ctx.source is not None else _Input(saved[0], None if kept else call.gather)
            dw = _weight_gradient(call.weight, whole, x)
        return leaving.wait() if leaving is not None else None, dw, None


def _start_output_gradient(call: Call, gradient: Tensor, shape: torch.Size) -> Pending:
    if call.scatter is None:
        return Pending(None, lambda: gradient)
    return start_gather(gradient, call.scatter.axis, call.scatter.dim, shape[call.scatter.dim])


@dataclass(frozen=True)
class _Input:
    """The input as it was saved, and how it is brought together where only a shard was."""

    saved: Tensor
    along: Along | None

    def get(self) -> Tensor:
        return self.saved if self.along is None else self.along.start_gather(self.saved).wait()


def _weight_gradient(weight: Weight, gradient: Tensor, x: "_Input | Source") -> Tensor | None:
    """Left to the stage's queue if that is open; else made now, its sum under way until the backward's end."""
    parameter = weight.parameter
    if not parameter.is_leaf or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return _make(gradient, x, weight).wait()
    if weight.queue is not None and weight.queue.is_open:
        operands = (gradient,) if isinstance(x, Source) else (gradient, x.saved)
        weight.queue.put(parameter, lambda dy, *_: _make(dy, x, weight), *operands)
    else:
        weight.late.add(parameter, _make(gradient, x, weight))
    return None


def _make(gradient: Tensor, x: "_Input | Source", weight: Weight) -> Pending:
    return weight.start_sum(weight_gradient(gradient, x.get()))
