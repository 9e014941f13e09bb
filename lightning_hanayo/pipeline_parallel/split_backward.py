"""Linear layers with a split backward, whose weight gradients can wait in the stage's queue.

forward             y  = x W^T + b
input gradient      dx = dy W                    in I, and in B
weight gradient     dW = dy^T x,  db = sum dy    in W if the queue is open; otherwise at once, as in autograd

x: (..., in), y: (..., out), W: (out, in). Compiled code finds a layer by its number, which it gets as a tensor.

The layers' `forward` is replaced by an attribute of the instance. Names, parameters, class and repr of a layer stay as
they are, and its copies and pickles are ordinary layers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.linear_modules import as_autocast, has_gradient_hooks, is_linear
from lightning_hanayo.weight_gradients import ComputeGradient, PendingGradient, WeightGradients, gradient_dtype

_Computations = list[tuple[ComputeGradient, tuple[Tensor, ...]]]
_Gradients = list[Tensor | PendingGradient]


class WeightGradientQueue:
    """Open while one micro-batch's input gradients are computed. Otherwise layers make weight gradients at once.

    I0   put(weight, compute, dy, x)      micro-batch 0:  weight -> [compute(dy, x)]  bias -> [compute(dy)]
    W0   drain(0)                         weight.grad += dy^T x; dy and x are freed
    """

    def __init__(self) -> None:
        self._waiting: dict[int, dict[Tensor, _Computations]] = {}
        self._open: dict[Tensor, _Computations] | None = None
        self.version = 0
        """changes before and after every batch: then layers drop copies of their weights"""

    @property
    def is_open(self) -> bool:
        """Whether layers leave their weight gradients here."""
        return self._open is not None

    def save(self) -> dict[Tensor, _Computations] | None:
        """State of the action that runs now, to be restored after another one has run."""
        return self._open

    def restore(self, saved: dict[Tensor, _Computations] | None) -> None:
        """The action runs again."""
        self._open = saved

    def collecting(self, microbatch: int) -> Self:
        """Open the queue for `microbatch`, in a `with` statement."""
        self._open = self._waiting[microbatch] = {}
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = None

    def put(self, parameter: Tensor, compute: ComputeGradient, *operands: Tensor) -> None:
        """Keep a computation of the open micro-batch."""
        assert self._open is not None
        self._open.setdefault(parameter, []).append((compute, operands))

    def drain(self, microbatch: int) -> None:
        """Compute the weight gradients of `microbatch`, add them to `.grad`, and free the operands.

        The gradients of one parameter are added to each other first, as in autograd, so sums agree to the last bit.
        """
        waiting = self._waiting.pop(microbatch, None)
        pending: tuple[Tensor, _Gradients] | None = None
        with torch.no_grad():
            while waiting:
                parameter, computations = waiting.popitem()
                computed = [compute(*operands) for compute, operands in computations]
                gradients = [one for one in computed if one is not None]
                del computations  # frees the operands now, even if a sum over ranks takes long
                if pending is not None:
                    accumulate(*pending)
                pending = (parameter, gradients) if gradients else None
            if pending is not None:
                accumulate(*pending)

    def clear(self) -> None:
        """Forget everything, before a batch and after it."""
        self._waiting.clear()
        self.version += 1


def accumulate(parameter: Tensor, gradients: _Gradients) -> None:
    """Add the sum of `gradients` to `parameter.grad`, in its dtype. The sum is in the gradients' own dtype.

    Only where `.grad` has another dtype than the parameter, each gradient is cast before the sum, as autograd does it.
    """
    dtype = gradient_dtype(parameter)
    total: Tensor | None = None
    for gradient in gradients:
        gradient = gradient if isinstance(gradient, Tensor) else gradient.wait()
        if dtype is not parameter.dtype:
            gradient = gradient.to(dtype)
        total = gradient if total is None else total + gradient
    assert total is not None
    if total.dtype is not dtype:
        total = total.to(dtype)
    if (before := parameter.grad) is None:
        parameter.grad = total
    else:
        before.add_(total)


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
                f"a weight of shape {tuple(weight.shape)} in a compiled block has got new memory since the run began "
                f"(module.to(...), say). Write into it instead: param.data.copy_(...)."
            )

    def gradient(self, parameter: Tensor, dy: Tensor, x: Tensor | None) -> Tensor | None:
        """The gradient of `parameter`, or None if the open queue takes it: the weight's if x is given, else the bias's.

        The queue is not open for an `autograd.grad` called by a block.
        """
        is_backward = not torch.is_grad_enabled() and torch.autograd._is_checkpoint_valid()
        if not self.queue.is_open or not is_backward or has_gradient_hooks(parameter):
            return bias_gradient(dy) if x is None else self.product(dy, x)
        if x is None:
            self.queue.put(parameter, bias_gradient, dy)
        else:
            self.queue.put(parameter, self.product, dy, x.detach())
        return None


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
        dx = None
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if needs_x:
            matrix = weight.to(dy.dtype) if ctx.cast is None or torch.is_grad_enabled() else ctx.cast
            dx = dy.mm(matrix.t() if layer.transposed else matrix).view(x.shape)
        dw = layer.gradient(ctx.parameters[0], dy, x) if needs_weight else None
        db = layer.gradient(ctx.parameters[1], dy, None) if needs_bias else None
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
    for parameter, operand in zip(layer.parameters, (x, None), strict=True):
        if parameter is None or not parameter.requires_grad or not torch.autograd._is_checkpoint_valid():
            continue
        own = layer.gradient(parameter, dy, operand)
        if own is not None:  # autograd accumulates the gradient, which calls the hooks
            torch.autograd.backward([parameter], [own.to(parameter.dtype)])
    matrix = weight.to(dy.dtype)
    return dy.mm(matrix.t() if transposed else matrix).view(x.shape), torch.zeros_like(handle)


@torch.library.register_fake("hanayo::input_gradient", lib=_library)
def _fake_input_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, handle: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(handle)


_LAYER = "_split_linear"


def patch_linear_layers(blocks: Iterable[nn.Module], queue: WeightGradients, *, keep: Collection[Tensor] = ()) -> None:
    """Let the linear layers of one stage's `blocks` use its `queue`: `nn.Linear` and `Conv1D`, but no subclasses.

    The gradients of the parameters in `keep`, which other stages use too, are made with the input gradients.
    """
    for module in {part: None for block in blocks for part in block.modules()}:
        is_free = _LAYER in vars(module) or "forward" not in vars(module)
        if is_linear(module) and is_free and module.weight not in keep:
            layer = SplitLinear(module, queue, transposed=type(module) is not nn.Linear)
            object.__setattr__(module, _LAYER, layer)
            module.forward = MethodType(forward, module)


def unpatch_linear_layers(blocks: Iterable[nn.Module]) -> None:
    """Give the layers their own `forward` back."""
    for block in blocks:
        for module in block.modules():
            if _LAYER in vars(module):
                del vars(module)[_LAYER], module.forward


def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Any:
    """Replaces the module's forward, whose one argument callers may name. Pickle needs the name `forward`."""
    (x,) = (*args, *kwargs.values())
    layer: SplitLinear | None = module._split_linear
    if layer is None:
        return type(module).forward(module, x)
    if torch.compiler.is_dynamo_compiling():
        uses_queue = layer.trained and torch.is_grad_enabled() and x.ndim > 1
        return layer.call_compiled(x) if uses_queue else type(module).forward(module, x)
    weight = module.weight
    return layer.call(x, weight, module.bias) if can_split(x, weight) else type(module).forward(module, x)
