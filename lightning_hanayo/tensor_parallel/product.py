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

Several layers that read one input are one product, with their weights as the rows of one matrix: each of the three
all-gathers and of the three reduce-scatters is one collective for all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.linear_modules import as_autocast, has_gradient_hooks
from lightning_hanayo.tensor_parallel import collectives
from lightning_hanayo.tensor_parallel.mesh import MeshAxis, Pending
from lightning_hanayo.tensor_parallel.weights import ShardedWeight

Keep = Literal["gathered", "shards"]
"""tensors that a product saves for its backward"""


@dataclass(frozen=True)
class SequenceParts:
    """The sizes of the equal parts into which sequences are cut, with padding where that is needed.

    No two lengths have parts of the same size, so that a part's size tells the length. Over two ranks:

        length 7    4 + 4, of which 1 is padding
        length 8    5 + 5, of which 2 are padding, because 4 is taken

    Args:
        count: how many parts each sequence has.
        sizes: the size of one part, by length.
        padded: the size of a part and the length, of those sequences whose parts are padded.
    """

    count: int
    sizes: Mapping[int, int]
    padded: tuple[tuple[int, int], ...]

    def length(self, size: int) -> int:
        """Returns the length of the sequences whose parts have this size.

        Raises:
            UnsupportedError: there are none.
        """
        for length, own in self.sizes.items():
            if own == size:
                return length
        raise UnsupportedError(
            f"a layer of a cube reads a tensor of {size} positions, of none of the sequences of {list(self.sizes)} "
            f"that enter the blocks. If it is made of another argument, name that in `streams` of their BlockSpec."
        )

    def size(self, length: int) -> int:
        """Returns the size of the parts of sequences of this length.

        Raises:
            UnsupportedError: there are none.
        """
        if length not in self.sizes:
            raise UnsupportedError(
                f"a layer of a cube writes a tensor of {length} positions, but sequences of {list(self.sizes)} "
                f"positions enter the blocks. Registered blocks must keep the length of their residual streams."
            )
        return self.sizes[length]


@lru_cache(maxsize=1024)
def sequence_parts(lengths: tuple[int, ...], count: int) -> SequenceParts | None:
    """Returns the parts of sequences of these lengths over so many ranks; None if nothing has to be known of them.

    The sizes of one length's parts don't depend on later lengths.
    """
    if not lengths or count == 1:
        return None
    sizes: dict[int, int] = {}
    for length in dict.fromkeys(lengths):
        size = -(-length // count)
        while size in sizes.values():
            size += 1
        sizes[length] = size
    padded = tuple((size, length) for length, size in sizes.items() if size * count != length)
    return SequenceParts(count, sizes, padded)


@dataclass(frozen=True)
class BoundCollective:
    """A collective of an input's or output's dimension `dim`; `parts` are those of sequences, if it is one of them."""

    axis: MeshAxis
    dim: int
    parts: SequenceParts | None = None

    def gather(self, x: Tensor) -> Pending[Tensor]:
        """Start to gather the parts of `x`."""
        size = None if self.parts is None else self.parts.length(x.shape[self.dim])
        return collectives.start_all_gather(x, self.axis, self.dim, size)

    def scatter_each(self, tensors: list[Tensor]) -> Pending[list[Tensor]]:
        """Start to sum several tensors, which are taken out of the list; each rank gets its part."""
        if self.parts is not None:
            sizes = [self.parts.size(x.shape[self.dim]) * self.parts.count for x in tensors]
            tensors[:] = [collectives.padded(x, self.dim, size) for x, size in zip(tensors, sizes, strict=True)]
        return collectives.start_reduce_scatter_each(tensors, self.axis, self.dim)


@dataclass(frozen=True)
class ProductArgs:
    """The weight and the collectives of one product, and how it runs.

    Args:
        weight: W, of one layer or of several.
        all_gather: of the input.
        reduce_scatter: of the outputs.
        keep: the tensors that are saved for the backward.
        num_pieces: in how many pieces the product runs; in fewer if there are fewer rows.
        has_empty_pieces: whether it runs in so many pieces even then, as all ranks of the mesh must.
    """

    weight: ShardedWeight
    all_gather: BoundCollective
    reduce_scatter: BoundCollective
    keep: Keep = "gathered"
    num_pieces: int = 1
    has_empty_pieces: bool = False

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Cut `x` along a dimension before the last one that no collective touches; whole if there is none."""
        if self.num_pieces == 1:
            return (x,)
        touched = self._touched_dims(x)
        free = [dim for dim in range(x.dim() - 1) if dim not in touched]
        if not free:
            return (x,)
        count = self.num_pieces if self.has_empty_pieces else max(1, min(self.num_pieces, x.shape[free[0]]))
        return x.tensor_split(count, free[0])

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join the pieces of `split`: of an input, an output or a gradient."""
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(list(pieces), min(set(range(pieces[0].dim() - 1)) - self._touched_dims(pieces[0])))

    def join_each(self, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The pieces of several tensors, joined."""
        return list(pieces[0]) if len(pieces) == 1 else [self.join(one) for one in zip(*pieces, strict=True)]

    def _touched_dims(self, x: Tensor) -> set[int]:
        return {one.dim % x.dim() for one in (self.all_gather, self.reduce_scatter)}


def products(x: Tensor, args: ProductArgs) -> tuple[Tensor, ...]:
    """X [..., K/z] to the gathered X, and to Y [..., N/y] of each part of the weight.

    Called by all ranks of the mesh, in the same order. Under autocast X and W are cast before they are sent, and the
    output has the cast dtype.
    """
    outputs: tuple[Tensor, ...] = _Product.apply(as_autocast(x), args, *args.weight.parameters)
    return outputs


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """[..., K] times [N, K] to [..., N]: all the arithmetic of a product's forward."""
    return torch.nn.functional.linear(a, b)


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """[..., N] times [N, K] to [..., K]."""
    return gradient @ weight


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """[..., N] and [..., K] to [N, K]."""
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def run_forward(x: Tensor, args: ProductArgs) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
    """Returns the gathered X, in pieces, the matrices, the outputs, and what sizes these have without padding.

    The sizes are those of the dimension that is summed. Meanwhile the weights that are used next are gathered.
    """
    weight, scatter = args.weight, args.reduce_scatter
    pending_matrices = weight.stage.gather(weight, x.dtype)
    pending_inputs = [args.all_gather.gather(piece) for piece in args.split(x)]
    matrices = pending_matrices.wait()
    weight.stage.prefetch_after(weight, x.dtype)
    # an output that stays here is no part of another one
    factors = matrices if scatter.axis.size > 1 else weight.split(matrices, 0)
    gathered, pending_outputs = [], []
    for pending in pending_inputs:
        gathered.append(pending.wait())
        ys = weight.split([multiply(gathered[-1], factor) for factor in factors], -1)
        sizes = [y.shape[scatter.dim] for y in ys]
        pending_outputs.append(scatter.scatter_each(ys))
    return gathered, matrices, args.join_each([pending.wait() for pending in pending_outputs]), sizes


@dataclass(eq=False)
class SavedInput:
    """A product's input as it is saved for the backward: gathered, in pieces, or shards that `collective` gathers."""

    saved: Sequence[Tensor]
    collective: BoundCollective | None
    _pending: list[Pending[Tensor]] | None = None

    def start(self) -> None:
        """Start to gather, before `get` needs the result."""
        if self._pending is None and self.collective is not None:
            self._pending = [self.collective.gather(shard) for shard in self.saved]

    def get(self) -> list[Tensor]:
        """Returns the gathered input, in pieces."""
        self.start()
        pending, self._pending = self._pending, None
        return list(self.saved) if pending is None else [one.wait() for one in pending]


def run_backward(
    args: ProductArgs,
    x: SavedInput,
    matrices: list[Tensor] | None,
    gradients: Sequence[Tensor],
    sizes: Sequence[int],
    of_x: Tensor | None,
    *,
    is_used: Sequence[bool],
    needs_x: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Returns the input's gradient, and that of each parameter; None where there is none, or it is left for later.

    Args:
        args: the forward's.
        x: its input.
        matrices: of the weight; None gathers them again.
        gradients: of the outputs.
        sizes: the forward's.
        of_x: the gradient of other uses of the gathered input, if there are any.
        is_used: whether each output has a gradient. A weight whose output has none gets none, as in one process.
        needs_x: whether the input's gradient is wanted.
    """
    weight, back = args.weight, args.reduce_scatter
    pieces = zip(*map(args.split, gradients), strict=True)
    pending_gradients = [collectives.start_all_gather_each(piece, back.axis, back.dim, sizes) for piece in pieces]
    pending_matrices = Pending.done(matrices or [])
    if needs_x and matrices is None:
        pending_matrices = Pending(None, cache(weight.stage.gather(weight, x.saved[0].dtype).wait))
    parameters, trained = weight.parameters, weight.trained(is_used)
    needs_weight = any(parameter.requires_grad for parameter in parameters)
    # whether somebody wants the gradient as autograd hands it on: hooks, or `autograd.grad` within a block
    is_inner = not torch.autograd._is_checkpoint_valid()
    is_watched = any(is_inner or not one.is_leaf or has_gradient_hooks(one) for one in parameters)
    queue = weight.stage.queue
    if queue is not None and (is_watched or not queue.is_open):
        queue = None
    if needs_weight and queue is None:
        x.start()
    added = [None] * len(pending_gradients) if of_x is None else args.split(of_x)
    gathered, pending_outputs = [], []
    for pending, dx in zip(pending_gradients, added, strict=True):
        gathered.append(weight.join(pending.wait()))
        if needs_x:
            summed = [_sum_of_products(gathered[-1], pending_matrices.wait(), dx)]
            pending_outputs.append(args.all_gather.scatter_each(summed))
    of_weights: list[Tensor | None] = [None] * len(parameters)
    if needs_weight and queue is not None:
        deferred = _Deferred(weight, trained, (gathered, x))
        for i, parameter in enumerate(parameters):
            if trained[i]:
                queue.put(parameter, partial(deferred.start, i))
    elif needs_weight and is_watched:
        summed = weight.start_reduce_scatter(_compute(gathered, x)).wait()
        of_weights = [one if trains else None for one, trains in zip(summed, trained, strict=True)]
    elif needs_weight:
        weight.stage.add(weight, _compute(gathered, x), trained)
    return args.join_each([one.wait() for one in pending_outputs])[0] if needs_x else None, of_weights


def _sum_of_products(gradients: Sequence[Tensor], matrices: Sequence[Tensor], total: Tensor | None) -> Tensor:
    """Of each gradient of an output with its matrix, and of what else there is."""
    for gradient, matrix in zip(gradients, matrices, strict=True):
        own = input_gradient(gradient, matrix)
        total = own if total is None else own.add_(total)
    assert total is not None
    return total


@dataclass(eq=False)
class _Deferred:
    """The gradients of a product's weights, computed together when the first of them is asked for."""

    weight: ShardedWeight
    trained: Sequence[bool]
    operands: tuple[list[list[Tensor]], SavedInput] | None
    """the gradients of the outputs, and the input, until they are multiplied"""
    _summed: Pending[list[Tensor]] | None = None

    def start(self, i: int) -> Pending[Tensor] | None:
        """The i-th parameter's gradient; None if it is added to other micro-batches' before ranks add it up."""
        weight = self.weight
        if self.operands is not None:
            computed, self.operands = _compute(*self.operands), None
            if weight.stage.keeps(weight):
                weight.stage.add(weight, computed, self.trained)
            else:
                self._summed = Pending(None, cache(weight.start_reduce_scatter(computed).wait))
        if self._summed is None:
            return None
        return Pending(None, lambda summed=self._summed: summed.wait()[i])  # type: ignore[misc]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, args: ProductArgs, *parameters: Tensor) -> tuple[Tensor, ...]:
        gathered, matrices, outputs, sizes = run_forward(x, args)
        ctx.set_materialize_grads(False)
        ctx.args, ctx.sizes, ctx.shapes = args, sizes, [y.shape for y in outputs]
        ctx.num_matrices = len(matrices) if args.keep == "gathered" else 0
        if args.keep == "gathered":
            ctx.save_for_backward(*matrices, *gathered)
        else:
            ctx.save_for_backward(x)
        # Views would not be allowed to change in place.
        return args.join(gathered), *(y.data if y._is_view() else y for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_x: Tensor | None, *of_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        args, is_used = ctx.args, [one is not None for one in of_outputs]
        if not any(is_used):  # layers read another input, perhaps this one after a change in place
            pieces = () if of_x is None else args.split(of_x)
            summed = [args.all_gather.scatter_each([piece]).wait() for piece in pieces]
            return args.join_each(summed)[0] if summed else None, *(None for _ in ctx.needs_input_grad[1:])
        saved, count, matrices = ctx.saved_tensors, ctx.num_matrices, None
        if args.keep == "gathered":
            x, matrices = SavedInput(saved[count:], None), list(saved[:count])
        else:
            x = SavedInput(args.split(saved[0]), args.all_gather)
        gradients = [
            saved[0].new_zeros(shape) if one is None else one for one, shape in zip(of_outputs, ctx.shapes, strict=True)
        ]
        needs_x = ctx.needs_input_grad[0]
        dx, of_weights = run_backward(args, x, matrices, gradients, ctx.sizes, of_x, is_used=is_used, needs_x=needs_x)
        return dx, None, *of_weights


def _compute(gradients: Sequence[Sequence[Tensor]], x: SavedInput) -> list[Tensor]:
    """The gradients of the matrices, summed over pieces."""
    total: list[Tensor] = []
    for of_matrices, part in zip(gradients, x.get(), strict=True):
        dws = [weight_gradient(dy, part) for dy in of_matrices]
        total = [old.add_(dw) for old, dw in zip(total, dws, strict=True)] if total else dws
    return total


@dataclass(frozen=True)
class AxisCollective:
    """A collective over the ranks of `axis`, which hold, or get, parts of dimension `dim`.

    The parts of a sequence may be padded. The all-gather of such parts drops the padding.
    """

    axis: str
    dim: int
    is_sequence: bool = False


@dataclass(frozen=True)
class ParallelStyle:
    """The two collectives of a linear layer: which axis gathers its input, and which one sums its output.

                                 input                       output                        stored
        sequence, column-        [batch/x, seq/y, K/z]       [batch/x, seq, N/(y z)]       W: [N/(y x), K/z]
        sequence, row-parallel   [batch/x, seq, K/(y z)]     [batch/x, seq/y, N/z]         W: [N/(z x), K/y]

        batch, column-           [batch/(x y), seq, K/z]     [batch/(x z), seq, N/y]
        batch, row-parallel      [batch/(x z), seq, K/y]     [batch/(x y), seq, N/z]

    A column-parallel layer leads from the residual stream to sharded heads or inner features, a row-parallel layer
    leads back, as in Megatron. In 3-D the input is sharded too, along y and z, and the weight also along x. Both layers
    all-gather their input and reduce-scatter their output; y and z trade roles between them.

    Source: arXiv 2105.14450, section 3.1. Its layout is `BATCH`; sharding the sequence, and W's orientation, are ours.

    Args:
        all_gather: of the input's parts.
        reduce_scatter: of the output's partial sums.
    """

    all_gather: AxisCollective
    reduce_scatter: AxisCollective

    def row_parallel(self) -> "ParallelStyle":
        """Returns the style of the row-parallel layer that leads back to where this column-parallel one began."""
        return ParallelStyle(self.reduce_scatter, self.all_gather)

    @property
    def out_axes(self) -> str:
        """The axes that the weight's out-features are sharded over, in order."""
        return self.all_gather.axis + "x"

    @property
    def in_axes(self) -> str:
        """The axis that the weight's in-features are sharded over."""
        return self.reduce_scatter.axis

    @property
    def between_axes(self) -> str:
        """The axes that the output's features are sharded over: a bias's, and the heads of q, k and v."""
        return self.all_gather.axis + (self.reduce_scatter.axis if self.reduce_scatter.dim == -1 else "")

    @property
    def replicated_axes(self) -> str:
        """The other axes, over which a bias's gradient is a partial sum."""
        return "".join(axis for axis in "xyz" if axis not in self.between_axes)


NO_COLLECTIVE = AxisCollective("", -1)
"""of an input that is gathered already, or of outputs that are no partial sums"""

SEQUENCE = ParallelStyle(AxisCollective("y", 1, is_sequence=True), AxisCollective("z", -1))
"""column-parallel; the residual stream is sharded over batch, sequence and features"""

SEQUENCE_FIRST = ParallelStyle(AxisCollective("y", 0, is_sequence=True), AxisCollective("z", -1))
"""the same for [seq, batch, features]"""

BATCH = ParallelStyle(AxisCollective("y", 0), AxisCollective("z", 0))
"""column-parallel; the residual stream is sharded over batch (twice) and features, as in the paper"""

EXCHANGED_TOKENS = ParallelStyle(AxisCollective("y", 1), AxisCollective("z", 0))
"""in a generic block: tokens [z, m, K/z] of all ranks, on their way to [y, m, N/y]"""
