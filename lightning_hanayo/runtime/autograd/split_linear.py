"""The split linear: a layer's two backward products, of which the weight's may wait in its stage's queue.

forward             y  = x W^T + b
input gradient      dx = dy W                    in I, and in B
weight gradient     dW = dy^T x,  db = sum dy    left to W if the queue is open, else at once, as autograd does

x: (..., in), y: (..., out), W: (out, in). Compiled code reaches a layer by its number, which travels as a tensor.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.linear_modules import as_autocast, has_gradient_hooks
from lightning_hanayo.weight_gradients import WeightGradients

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, SplitLinear] = weakref.WeakValueDictionary()


class SplitLinear:
    """What stands behind one swapped module's forward.

    Args:
        module: with `weight` and `bias`.
        queue: its stage's.
        transposed: whether the weight is (in, out), as a `Conv1D` of Hugging Face has it.
    """

    def __init__(self, module: nn.Module, queue: WeightGradients, *, transposed: bool) -> None:
        self.queue = queue
        self.transposed = transposed
        self.product = transposed_gradient if transposed else weight_gradient
        self._module = weakref.ref(module)
        self._cast: tuple[tuple[int, int], weakref.ref[Tensor]] | None = None
        number = next(_numbers)
        _layers[number] = self
        self.handle = torch.tensor(float(number), dtype=torch.float64, device="cpu", requires_grad=True)
        """the layer's number; it requires a gradient, so that a compiled backward can't leave the layer's call out"""
        self.trained = self.parameters[0].requires_grad
        self.values = tuple(None if parameter is None else parameter.detach() for parameter in self.parameters)
        """weight and bias for compiled code: of a parameter among its inputs it would call the hooks, with None"""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled module belongs to no stage."""
        return type(None), ()

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, as the module has them now."""
        module: Any = self._module()
        return module.weight, module.bias

    def call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The forward, of operands for which `can_wait` holds."""
        return _Eager.apply(as_autocast(x), weight, bias, self)  # type: ignore[no-any-return]

    def call_compiled(self, x: Tensor) -> Tensor:
        """The forward as compiled code has it, which must not touch the parameters themselves."""
        rows = as_autocast(x).reshape(-1, x.shape[-1])
        y: Tensor = _Compiled.apply(rows, *self.values, self.handle, self.transposed)
        return y.view(*x.shape[:-1], y.shape[-1])

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`: one copy for all micro-batches under way, gone with the last graph that holds it."""
        key = self.queue.version, weight._version
        known = self._cast[1]() if self._cast is not None and self._cast[0] == key else None
        if known is None or known.dtype is not dtype:
            known = weight.detach().to(dtype)
            self._cast = key, weakref.ref(known)
        return known

    def check(self, value: Tensor) -> None:
        """See that compiled code has used the weight that the module has now.

        Raises:
            UnsupportedError: the parameter's memory was exchanged since the run began.
        """
        weight, _ = self.parameters
        if weight.data_ptr() != value.data_ptr():
            raise UnsupportedError(
                f"a weight of shape {tuple(weight.shape)} in a compiled block has got new memory (param.data = ..., or "
                f"module.to(...)) since the run began. Write into it instead: param.data.copy_(...)."
            )

    def leave(self, parameter: Tensor, rows: Tensor, x: Tensor | None) -> None:
        """Keep the product for `parameter`: of the weight if there is an `x`, else of the bias."""
        if x is None:
            self.queue.put(parameter, bias_gradient, rows)
        else:
            self.queue.put(parameter, self.product, rows, x.detach())


def can_wait(x: Tensor, weight: Tensor) -> bool:
    """Whether a layer may make this weight's gradient itself: a leaf that trains, in a forward of the ordinary kind."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and weight.is_leaf
        and type(x) is Tensor
        and x.ndim > 1
        and not x.is_nested
        and not torch._C._are_functorch_transforms_active()
    )


def weight_gradient(rows: Tensor, x: Tensor) -> Tensor:
    """(n, out), (..., in) -> (out, in)."""
    return rows.t().mm(x.reshape(-1, x.shape[-1]))


def transposed_gradient(rows: Tensor, x: Tensor) -> Tensor:
    """(n, out), (..., in) -> (in, out)."""
    return x.reshape(-1, x.shape[-1]).t().mm(rows)


def bias_gradient(rows: Tensor) -> Tensor:
    """(n, out) -> (out,)."""
    return rows.sum(0)


def _waits(queue: WeightGradients) -> bool:
    """Whether this backward is the one that the queue is open for, and not `autograd.grad` called by a block."""
    return queue.is_open and not torch.is_grad_enabled() and torch.autograd._is_checkpoint_valid()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return functional.linear(x, weight.t() if transposed else weight, bias)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: SplitLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.parameters, ctx.cast = layer, (weight, bias), None
        if x.dtype is not weight.dtype:  # autocast; its own cache would keep a weight that has lost its graph
            weight = ctx.cast = layer.cast(weight, x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        y = _product(x, weight, bias, layer.transposed)
        return y.data if y._is_view() else y  # no view of it, so what follows may work on it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: SplitLinear = ctx.layer
        rows = gradient.reshape(-1, gradient.shape[-1])
        waits = _waits(layer.queue)
        dx = dw = db = None
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if needs_x:
            matrix = weight.to(rows.dtype) if ctx.cast is None or torch.is_grad_enabled() else ctx.cast
            dx = rows.mm(matrix.t() if layer.transposed else matrix).view(x.shape)
        if needs_weight:
            if waits and not has_gradient_hooks(ctx.parameters[0]):
                layer.leave(ctx.parameters[0], rows, x)
            else:
                dw = layer.product(rows, x)
        if needs_bias:
            if waits and not has_gradient_hooks(ctx.parameters[1]):
                layer.leave(ctx.parameters[1], rows, None)
            else:
                db = bias_gradient(rows)
        return dx, dw, db, None


class _Compiled(torch.autograd.Function):
    """As `_Eager`. A graph's outputs are fixed when it is compiled, so the layer adds to the gradients itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight, handle)
        ctx.transposed = transposed
        return _product(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), transposed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, handle = ctx.saved_tensors
        dx, done = _input_gradient(gradient, x, weight, handle, ctx.transposed)
        return dx, None, None, done, None


_library = torch.library.Library("hanayo", "DEF")
_library.define(
    "input_gradient(Tensor gradient, Tensor x, Tensor weight, Tensor handle, bool transposed) -> (Tensor, Tensor)"
)
_input_gradient: Any = torch.ops.hanayo.input_gradient.default


@torch.library.impl(_library, "input_gradient", "CompositeExplicitAutograd")
def _run_input_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, handle: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    rows = gradient.reshape(-1, gradient.shape[-1])
    layer = _layers[int(handle.detach())]
    layer.check(weight)
    if torch.autograd._is_checkpoint_valid():
        _settle(layer, rows, x)
    matrix = weight.to(rows.dtype)
    return rows.mm(matrix.t() if transposed else matrix).view(x.shape), torch.zeros_like(handle)


@torch.library.register_fake("hanayo::input_gradient", lib=_library)
def _fake_input_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, handle: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(handle)


def _settle(layer: SplitLinear, rows: Tensor, x: Tensor) -> None:
    """Leave both gradients to the queue, or hand them to autograd's accumulation, which calls the hooks."""
    for parameter, operand in zip(layer.parameters, (x, None), strict=True):
        if parameter is None or not parameter.requires_grad:
            continue
        if _waits(layer.queue) and not has_gradient_hooks(parameter):
            layer.leave(parameter, rows, operand)
            continue
        gradient = bias_gradient(rows) if operand is None else layer.product(rows, operand)
        torch.autograd.backward([parameter], [gradient.to(parameter.dtype)])
