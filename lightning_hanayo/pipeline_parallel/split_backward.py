"""A linear layer with a split backward: its weight gradient can wait in the stage's queue.

forward             y  = x W^T + b
input gradient      dx = dy W                    in I, and in B
weight gradient     dW = dy^T x,  db = sum dy    in W if the queue is open; otherwise at once, as in autograd

x: (..., in), y: (..., out), W: (out, in). Compiled code finds a layer by its number, which it gets as a tensor.
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
    """The computation of one patched module. Its weight may be `transposed` to (in, out), as in `Conv1D`."""

    def __init__(self, module: nn.Module, queue: WeightGradients, *, transposed: bool) -> None:
        self.queue = queue
        self.transposed = transposed
        self.product = transposed_gradient if transposed else weight_gradient
        self._module = weakref.ref(module)
        self._cast: tuple[tuple[int, int], weakref.ref[Tensor]] | None = None
        number = next(_numbers)
        _layers[number] = self
        self.handle = torch.tensor(float(number), dtype=torch.float64, device="cpu", requires_grad=True)
        """the layer's number; it requires a gradient, so that a compiled backward always calls the layer"""
        self.trained = self.parameters[0].requires_grad
        self.values = tuple(None if parameter is None else parameter.detach() for parameter in self.parameters)
        """weight and bias for compiled code, which would call the hooks of a parameter among its inputs with None"""

    def __reduce__(self) -> tuple[Any, ...]:
        """Becomes None when copied or pickled: the copy of a module belongs to no stage."""
        return type(None), ()

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """The module's current weight and bias."""
        module: Any = self._module()
        return module.weight, module.bias

    def call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the forward, on operands for which `can_split` holds."""
        return _EagerLinear.apply(as_autocast(x), weight, bias, self)  # type: ignore[no-any-return]

    def call_compiled(self, x: Tensor) -> Tensor:
        """Run the forward in compiled code, which must not use the parameters themselves."""
        flat = as_autocast(x).reshape(-1, x.shape[-1])
        y: Tensor = _CompiledLinear.apply(flat, *self.values, self.handle, self.transposed)
        return y.view(*x.shape[:-1], y.shape[-1])

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`: one copy for all micro-batches under way, freed with the last graph that uses it."""
        key = self.queue.version, weight._version
        known = self._cast[1]() if self._cast is not None and self._cast[0] == key else None
        if known is None or known.dtype is not dtype:
            known = weight.detach().to(dtype)
            self._cast = key, weakref.ref(known)
        return known

    def check(self, value: Tensor) -> None:
        """Check that compiled code has used the module's current weight.

        Raises:
            UnsupportedError: the parameter has got new memory since the run began.
        """
        weight, _ = self.parameters
        if weight.data_ptr() != value.data_ptr():
            raise UnsupportedError(
                f"a weight of shape {tuple(weight.shape)} in a compiled block has got new memory (param.data = ..., or "
                f"module.to(...)) since the run began. Write into it instead: param.data.copy_(...)."
            )

    def leave(self, parameter: Tensor, dy: Tensor, x: Tensor | None) -> None:
        """Leave the gradient of `parameter` to the queue: the weight's if `x` is given, otherwise the bias's."""
        if x is None:
            self.queue.put(parameter, bias_gradient, dy)
        else:
            self.queue.put(parameter, self.product, dy, x.detach())


def can_split(x: Tensor, weight: Tensor) -> bool:
    """Whether the layer may compute this weight's gradient itself: a leaf that trains, used in an ordinary forward."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and weight.is_leaf
        and type(x) is Tensor
        and x.ndim > 1
        and not x.is_nested
        and not torch._C._are_functorch_transforms_active()
    )


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """(n, out), (..., in) -> (out, in)."""
    return dy.t().mm(x.reshape(-1, x.shape[-1]))


def transposed_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """(n, out), (..., in) -> (in, out)."""
    return x.reshape(-1, x.shape[-1]).t().mm(dy)


def bias_gradient(dy: Tensor) -> Tensor:
    """(n, out) -> (out,)."""
    return dy.sum(0)


def _queue_is_open(queue: WeightGradients) -> bool:
    """Whether the queue is open for this backward, which is not an `autograd.grad` called by a block."""
    return queue.is_open and not torch.is_grad_enabled() and torch.autograd._is_checkpoint_valid()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return functional.linear(x, weight.t() if transposed else weight, bias)


class _EagerLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: SplitLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.parameters, ctx.cast = layer, (weight, bias), None
        if x.dtype is not weight.dtype:  # autocast, whose own cache would keep a detached weight
            weight = ctx.cast = layer.cast(weight, x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        y = _product(x, weight, bias, layer.transposed)
        return y.data if y._is_view() else y  # not a view, so that later code may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: SplitLinear = ctx.layer
        dy = gradient.reshape(-1, gradient.shape[-1])
        uses_queue = _queue_is_open(layer.queue)
        dx = dw = db = None
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if needs_x:
            matrix = weight.to(dy.dtype) if ctx.cast is None or torch.is_grad_enabled() else ctx.cast
            dx = dy.mm(matrix.t() if layer.transposed else matrix).view(x.shape)
        if needs_weight:
            if uses_queue and not has_gradient_hooks(ctx.parameters[0]):
                layer.leave(ctx.parameters[0], dy, x)
            else:
                dw = layer.product(dy, x)
        if needs_bias:
            if uses_queue and not has_gradient_hooks(ctx.parameters[1]):
                layer.leave(ctx.parameters[1], dy, None)
            else:
                db = bias_gradient(dy)
        return dx, dw, db, None


class _CompiledLinear(torch.autograd.Function):
    """Adds to the gradients itself, as a compiled graph's outputs are fixed when it is compiled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight, handle)
        ctx.transposed = transposed
        return _product(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), transposed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, handle = ctx.saved_tensors
        dx, handle_gradient = _input_gradient(gradient, x, weight, handle, ctx.transposed)
        return dx, None, None, handle_gradient, None


_library = torch.library.Library("hanayo", "DEF")
_library.define(
    "input_gradient(Tensor gradient, Tensor x, Tensor weight, Tensor handle, bool transposed) -> (Tensor, Tensor)"
)
_input_gradient: Any = torch.ops.hanayo.input_gradient.default


@torch.library.impl(_library, "input_gradient", "CompositeExplicitAutograd")
def _run_input_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, handle: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    dy = gradient.reshape(-1, gradient.shape[-1])
    layer = _layers[int(handle.detach())]
    layer.check(weight)
    if torch.autograd._is_checkpoint_valid():
        _add_gradients(layer, dy, x)
    matrix = weight.to(dy.dtype)
    return dy.mm(matrix.t() if transposed else matrix).view(x.shape), torch.zeros_like(handle)


@torch.library.register_fake("hanayo::input_gradient", lib=_library)
def _fake_input_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, handle: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(handle)


def _add_gradients(layer: SplitLinear, dy: Tensor, x: Tensor) -> None:
    """Leave both gradients to the queue, or let autograd accumulate them, which calls the hooks."""
    for parameter, operand in zip(layer.parameters, (x, None), strict=True):
        if parameter is None or not parameter.requires_grad:
            continue
        if _queue_is_open(layer.queue) and not has_gradient_hooks(parameter):
            layer.leave(parameter, dy, operand)
            continue
        gradient = bias_gradient(dy) if operand is None else layer.product(dy, operand)
        torch.autograd.backward([parameter], [gradient.to(parameter.dtype)])
