"""The products and collectives of compiled code: operators that run as they do without a compiler.

compiled graph      norm  ->  product(x, handle)  ->  attention  ->  product(x, handle)  ->  ...
                                     |
without a compiler            looks up the layer by its number, which the handle holds, and runs its product:
                              collectives, weights gathered ahead, gradients left to the stage's queue

A graph contains no parameter of a product and no process group, so that equal blocks share one graph. The compiler
fuses the code between the operators. Each operator reads the result of the one before it, so all ranks run their
collectives in one order.
"""

import itertools
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.tensor_parallel.mesh import MeshAxis
from lightning_hanayo.tensor_parallel.product import SavedInput, run_backward, run_forward

_numbers = itertools.count(1)
_found: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def new_handle(target: Any) -> Tensor:
    """Returns the number of an operator's `ShardedProduct` or `MeshAxis`, as a tensor.

    It requires a gradient, so that a compiled backward always runs the operators, whatever else needs one.
    """
    number = next(_numbers)
    _found[number] = target
    return torch.tensor(float(number), dtype=torch.float64, device="cpu", requires_grad=True)


_NAMESPACE = f"hanayo_{zlib.crc32(Path(__file__).read_bytes()):08x}"
"""changes with this file: inductor's cache on disk knows an operator by its name alone, and would call it with the
arguments that it had in another version (torch 2.13)"""
_library = torch.library.Library(_NAMESPACE, "DEF")


def _define(schema: str, shapes: Callable[..., Any], backward: Any = None) -> Any:
    """Define an operator, whose results have these shapes, and whose backward needs the handle alone.

    The function after it computes.
    """
    name = schema.partition("(")[0]
    _library.define(schema)

    def register(function: Any) -> Any:
        torch.library.impl(_library, name, "CompositeExplicitAutograd")(torch.no_grad()(function))
        torch.library.register_fake(f"{_NAMESPACE}::{name}", shapes, lib=_library)
        if backward is not None:
            torch.library.register_autograd(f"{_NAMESPACE}::{name}", backward, setup_context=_save_handle, lib=_library)
        return getattr(getattr(torch.ops, _NAMESPACE), name).default

    return register


def _save_handle(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _target(handle: Tensor) -> Any:
    return _found[int(handle.detach())]


def _product_shapes(*given: Any) -> list[Tensor]:
    x, _, gathers, _, gathered, outputs, rows = given
    shapes = [gathered] if gathers else []
    shapes += [outputs[i : i + x.dim()] for i in range(0, len(outputs), x.dim())]
    shapes += [[count, gathered[-1]] for count in rows or ()]
    return [x.new_empty(shape) for shape in shapes]


@_define(
    "product(Tensor x, Tensor handle, bool gathers, bool keeps, SymInt[] gathered, SymInt[] outputs, int[]? rows)"
    " -> Tensor[]",
    _product_shapes,
)
def compiled_product(*given: Any) -> list[Tensor]:
    """Returns the gathered X, if it `gathers`, the outputs, and the matrices, if there are any to keep.

    Args:
        x: this rank's shard.
        handle: of the layer.
        gathers: whether X is gathered.
        keeps: whether the backward gets the gathered tensors; otherwise it gathers again.
        gathered: the shape of the gathered X.
        outputs: the shapes of the outputs, one after the other.
        rows: of the gathered matrices, if they are kept.
    """
    x, handle, gathers, _, _, _, rows = given
    args = _target(handle).args()
    pieces, matrices, outputs, _ = run_forward(x, args)
    whole = [args.join(pieces)] if gathers else []
    return [one.contiguous() for one in (*whole, *outputs, *(matrices if rows else []))]


@_define(
    "product_backward(Tensor saved, Tensor[] matrices, Tensor[] gradients, bool[] is_used, Tensor? of_x,"
    " Tensor handle, bool is_shard, SymInt[] gathered, SymInt[] shape) -> (Tensor, Tensor)",
    lambda *given: (given[0].new_empty(given[8]), torch.empty_like(given[5])),
)
def _product_backward(*given: Any) -> tuple[Tensor, Tensor]:
    """Returns the gradient of x. Those of the parameters are added, or left for later, as without a compiler."""
    saved, matrices, gradients, is_used, of_x, handle, is_shard, gathered, _ = given
    args = _target(handle).args()
    x = SavedInput(args.split(saved), args.all_gather if is_shard else None)
    dim = args.reduce_scatter.dim % len(gathered)  # of which the outputs were summed, to these true sizes
    sizes = [size if dim == len(gathered) - 1 else gathered[dim] for size in args.weight.sizes]
    dx, of_weights = run_backward(args, x, matrices or None, gradients, sizes, of_x, is_used=is_used, needs_x=True)
    assert dx is not None
    if torch.autograd._is_checkpoint_valid():
        for parameter, gradient in zip(args.weight.parameters, of_weights, strict=True):
            if gradient is not None:
                torch.autograd.backward([parameter], [gradient])  # calls its hooks
    return dx.contiguous(), torch.zeros_like(handle)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, handle, ctx.gathers, keeps, ctx.gathered, outputs, rows = inputs
    ctx.set_materialize_grads(False)
    is_gathered = ctx.gathers and keeps
    ctx.is_shard, ctx.shape = ctx.gathers and not keeps, x.shape
    ctx.shapes = [outputs[i : i + x.dim()] for i in range(0, len(outputs), x.dim())]
    kept = output[len(output) - len(rows or ()) :]
    ctx.save_for_backward(output[0] if is_gathered else x, handle, *kept)


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    saved, handle, *matrices = ctx.saved_tensors
    of_x, first = (gradients[0], 1) if ctx.gathers else (None, 0)
    of_outputs = gradients[first : first + len(ctx.shapes)]
    is_used = [one is not None for one in of_outputs]
    whole = [saved.new_zeros(shape) if one is None else one for one, shape in zip(of_outputs, ctx.shapes, strict=True)]
    backward: Any = _product_backward
    dx, of_handle = backward(saved, matrices, whole, is_used, of_x, handle, ctx.is_shard, ctx.gathered, ctx.shape)
    return dx, of_handle, None, None, None, None, None


torch.library.register_autograd(f"{_NAMESPACE}::product", _backward, setup_context=_save, lib=_library)


@_define(
    "all_reduce(Tensor x, Tensor handle) -> Tensor",
    lambda x, handle: x.new_empty(x.shape),
    lambda ctx, dy: (compiled_all_reduce(dy, ctx.saved_tensors[0]), None),
)
def compiled_all_reduce(x: Tensor, handle: Tensor) -> Tensor:
    """The sum over all ranks of an axis, each of which computes its own part with it."""
    axis: MeshAxis = _target(handle)
    return axis.all_reduce(x.clone(memory_format=torch.contiguous_format)).wait()


@_define(
    "all_gather(Tensor x, Tensor handle, int size) -> Tensor",
    lambda x, handle, size: x.new_empty([size, *x.shape]),
    lambda ctx, dy: (_reduce_scatter(dy, ctx.saved_tensors[0]), None, None),
)
def compiled_all_gather(x: Tensor, handle: Tensor, size: int) -> Tensor:
    """[...] on each of an axis's `size` ranks to [size, ...], for ranks that compute different things with it."""
    axis: MeshAxis = _target(handle)
    return axis.all_gather(x).wait()


@_define("reduce_scatter(Tensor parts, Tensor handle) -> Tensor", lambda x, handle: x.new_empty(x.shape[1:]))
def _reduce_scatter(parts: Tensor, handle: Tensor) -> Tensor:
    axis: MeshAxis = _target(handle)
    return axis.reduce_scatter(parts).wait()
