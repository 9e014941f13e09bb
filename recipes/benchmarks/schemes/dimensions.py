"""The layers in one, two and three dimensions, on axes whose transfers are logged.

1-D (Megatron): the first layer of a pair is column-parallel, the second row-parallel.

    sequence form       x [M/P, h] -all-gather-> column -> [M, n/P] -> row -reduce-scatter-> [M/P, h]
    all-reduce form     x [M, h]                 column -> [M, n/P] -> row -all-reduce->     [M, h]

The input gradient of the column-parallel layer is summed while its weight gradient is computed; what was gathered is
kept. 4 (P-1)/P Mh per pair, forward and backward, in either form.

2-D (SUMMA): q x q ranks, each with a block of every matrix; panels are sent along rows and columns.

    Y[i,j]  = sum over l of X[i,l] W[j,l]^T       X[i,l] to its row, W[j,l] to its column
    dX[i,l] = sum over j of dY[i,j] W[j,l]        W[j,l] to its column, the parts of the sum over the row to l
    dW[j,l] = sum over i of dY[i,j]^T X[i,l]      X[i,l] to its row, the parts of the sum over the column to l

W[j,l] of torch's [N, K] is stored on rank (l, j). In the usual form all ranks take l = 0, 1, .. and receive the next
panels while these are multiplied. Here all panels are sent at once, each rank begins with its own block of X, and the
backward begins with the others' parts, so that no link is idle while another is busy: more memory, the same volume,
3 (q-1)/q^2 (MK + KN).

3-D: this package's linear layers on any mesh; the residual stream is sharded over batch, sequence and features.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.overlap.link_queue import LinkQueue, Work
from lightning_hanayo.overlap.turns import DeviceTurns
from lightning_hanayo.tensor_parallel import product as arithmetic
from lightning_hanayo.tensor_parallel.layers.linear import Linear3D
from lightning_hanayo.tensor_parallel.mesh import Mesh, MeshAxis, Pending, Transfers
from lightning_hanayo.tensor_parallel.product import SEQUENCE
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from lightning_hanayo.weight_gradients import WeightGradients
from recipes.benchmarks.schemes.layer import Device, Layer, Scheme, WholeLinear, shapes
from recipes.benchmarks.schemes.log import Log
from recipes.benchmarks.schemes.names import Find, make


class _LoggedTransfers:
    """Transfers whose waits are logged."""

    def __init__(self, works: Work, log: Log, number: int) -> None:
        self._works, self._log, self._number = works, log, number

    def wait(self) -> None:
        self._log.wait(self._number)
        self._works.wait()


class Wire(MeshAxis):
    """An axis whose transfers are logged.

    Args:
        group: the process group; None with a `size` above 1 for a dry one.
        size: the number of ranks.
        rank: this rank's number among them.
        log: of this host.
        queue: of this host; None: transfers start at once.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, size: int, rank: int, log: Log, queue: LinkQueue | None = None
    ) -> None:
        super().__init__(group, size, rank, queue)
        self._log = log

    @override
    def _exchange(self, exchanges: Sequence[tuple[Sequence[Tensor] | Tensor, Sequence[Tensor] | Tensor]]) -> Work:
        number = self._log.start(sum(into[0].numel() for _, into in exchanges) * (self.size - 1))
        works = Transfers([]) if self.group is None else super()._exchange(exchanges)
        return _LoggedTransfers(works, self._log, number)

    @override
    def all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending[Tensor]:
        if self.size == 1:
            return super().all_reduce(tensor)
        number = self._log.start(2 * tensor.numel() * (self.size - 1) / self.size)
        group = self.group
        works = Transfers([]) if group is None else self._start(lambda: group.allreduce([tensor], operation))
        return Pending(_LoggedTransfers(works, self._log, number), lambda: tensor)

    def shift(self, own: Tensor, step: int) -> Pending[Tensor]:
        """Receive from the rank `step` further on, and send `own` to the one `step` back. Called by all ranks."""
        if step % self.size == 0:
            return Pending(None, lambda: own)
        received, group = torch.empty_like(own), self.group
        number = self._log.start(own.numel())

        def post() -> Work:
            assert group is not None
            works = [group.recv([received], (self.rank + step) % self.size, 0)]
            works.append(group.send([own], (self.rank - step) % self.size, 0))
            return Transfers(works)

        works = Transfers([]) if group is None else self._start(post)
        return Pending(_LoggedTransfers(works, self._log, number), lambda: received)


def wires(log: Log) -> type[MeshAxis]:
    """Returns the class that a mesh makes its axes of."""
    return cast(type[MeshAxis], partial(Wire, log=log))


class OneD(Scheme):
    """All ranks of `axis`.

    Args:
        axis: the ranks.
        by_sequence: whether it is the sequence form.
    """

    def __init__(self, axis: MeshAxis, *, by_sequence: bool) -> None:
        self._axis = axis
        self._by_sequence = by_sequence

    @override
    def linear(self, index: int, weight: Tensor) -> nn.Module:
        return _Cut(
            self.cut_weight(index, weight),
            _RowParallel if index % 2 else _ColumnParallel,
            self._axis,
            self._by_sequence,
        )

    @override
    def cut(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        return (rows.chunk(self._axis.size)[self._axis.rank] if self._by_sequence else rows).clone()

    @override
    def cut_weight(self, index: int, weight: Tensor) -> Tensor:
        return weight.chunk(self._axis.size, index % 2)[self._axis.rank].contiguous()


class _Cut(nn.Module):
    def __init__(self, weight: Tensor, function: Any, axis: MeshAxis, by_sequence: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._function, self._axis, self._by_sequence = function, axis, by_sequence

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._function.apply(x, self.weight, self._axis, self._by_sequence)
        return y


def _gathered(x: Tensor, axis: MeshAxis) -> Tensor:
    """[m, n] of each to [P m, n]."""
    return axis.all_gather(x).wait().flatten(0, 1)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: MeshAxis, by_sequence: bool) -> Tensor:
        whole = _gathered(x, axis) if by_sequence else x
        ctx.save_for_backward(whole, weight)
        ctx.axis, ctx.by_sequence = axis, by_sequence
        return arithmetic.multiply(whole, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole, weight = ctx.saved_tensors
        dx = arithmetic.input_gradient(gradient, weight)
        if ctx.by_sequence:
            pending = ctx.axis.reduce_scatter(dx.unflatten(0, (ctx.axis.size, -1)))
        else:
            pending = ctx.axis.all_reduce(dx)
        dw = arithmetic.weight_gradient(gradient, whole)
        return pending.wait(), dw, None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: MeshAxis, by_sequence: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.by_sequence = axis, by_sequence
        y = arithmetic.multiply(x, weight)
        if by_sequence:
            return axis.reduce_scatter(y.unflatten(0, (axis.size, -1))).wait()
        return axis.all_reduce(y).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole = _gathered(gradient, ctx.axis) if ctx.by_sequence else gradient
        return arithmetic.input_gradient(whole, weight), arithmetic.weight_gradient(whole, x), None, None


class TwoD(Scheme):
    """Args:
    row: this rank's row i: the ranks (i, 0), (i, 1), ...
    column: its column j.
    """

    def __init__(self, row: Wire, column: Wire) -> None:
        self._row, self._column = row, column

    @override
    def linear(self, index: int, weight: Tensor) -> nn.Module:
        return _Block(self.cut_weight(index, weight), self._row, self._column)

    @override
    def cut(self, x: Tensor) -> Tensor:
        return self._block(x.flatten(0, 1), self._column.rank, self._row.rank)

    @override
    def cut_weight(self, index: int, weight: Tensor) -> Tensor:
        return self._block(weight, self._row.rank, self._column.rank)

    def _block(self, whole: Tensor, row: int, column: int) -> Tensor:
        return whole.chunk(self._row.size)[row].chunk(self._row.size, 1)[column].contiguous()


class _Block(nn.Module):
    def __init__(self, weight: Tensor, row: Wire, column: Wire) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._row, self._column = row, column

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Summa.apply(x, self.weight, self._row, self._column)
        return y


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, row: Wire, column: Wire) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.row, ctx.column = row, column
        panels = [row.rank + step for step in range(row.size)]
        y: Tensor | None = None
        for a, b in zip(_along(row, x, panels), _along(column, weight, panels), strict=True):
            part = arithmetic.multiply(a, b)
            y = part if y is None else y.add_(part)
        assert y is not None
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        row, column = ctx.row, ctx.column
        steps = [*range(1, row.size), 0]
        weights = _along(column, weight, [row.rank + step for step in steps])
        inputs = _along(row, x, [column.rank + step for step in steps])
        dx, dw = [], []
        for step, b, a in zip(steps, weights, inputs, strict=True):
            dx.append(row.shift(arithmetic.input_gradient(gradient, b), -step))
            dw.append(column.shift(arithmetic.weight_gradient(gradient, a), -step))
        return _sum(dx), _sum(dw), None, None


def _sum(parts: list[Pending[Tensor]]) -> Tensor:
    total = parts[0].wait()
    for part in parts[1:]:
        total.add_(part.wait())
    return total


def _along(axis: Wire, own: Tensor, ranks: list[int]) -> Iterator[Tensor]:
    """Returns the blocks of these ranks in this order. All are requested at once."""
    own = own.detach().contiguous()
    pending = [axis.shift(own, rank - axis.rank) for rank in ranks]
    return (panel.wait() for panel in pending)


_STYLES = SEQUENCE, SEQUENCE.row_parallel()


class ThreeD(Scheme):
    """The layers of `lightning_hanayo.tensor_parallel`.

    Args:
        mesh: the ranks.
        num_pieces: in how many pieces each product runs.
        queue: takes the weights' gradients while a backward is split; None: it never is.
        turns: which of two micro-batches runs now; None: there is one at a time.
        keep_weights: whether weights are gathered once a batch.
    """

    def __init__(
        self,
        mesh: Mesh,
        num_pieces: int = 1,
        queue: WeightGradients | None = None,
        turns: DeviceTurns | None = None,
        keep_weights: bool = False,
    ) -> None:
        self._mesh = mesh
        self.context = StageContext(mesh, num_pieces=num_pieces, queue=queue, turns=turns, keep_weights=keep_weights)

    @property
    @override
    def hooks(self) -> StageContext:
        return self.context

    @override
    def linear(self, index: int, weight: Tensor) -> nn.Module:
        out, in_ = weight.shape
        with torch.device("meta"):  # values come from `weight`
            linear = Linear3D(in_, out, bias=False, context=self.context, style=_STYLES[index % 2])
        linear.register_parameter("weight", nn.Parameter(self.cut_weight(index, weight)))
        return linear

    @override
    def begin(self) -> None:
        self.context.prefetch_order.begin()

    @override
    def cut(self, x: Tensor) -> Tensor:
        return Shard((DimShard(x.shape[0], "x"), DimShard(x.shape[1], "y"), DimShard(x.shape[2], "z"))).of(
            x, self._mesh
        )

    @override
    def cut_weight(self, index: int, weight: Tensor) -> Tensor:
        style = _STYLES[index % 2]
        return Shard((DimShard(weight.shape[0], style.out_axes), DimShard(weight.shape[1], style.in_axes))).of(
            weight, self._mesh
        )


HIDDEN, BATCH, SEQ, LAYERS = 16, 8, 8, 2


def check(name: str, hosts: int, rank: int, find: Find) -> float:
    """Returns the largest error of this host's parts, relative to the largest value, in fp64. Called by all hosts."""
    torch.manual_seed(0)
    weights = [[torch.randn(shape).double() / HIDDEN**0.5 for shape in shapes(HIDDEN)] for _ in range(LAYERS)]
    x, gradient = torch.randn(2, BATCH, SEQ, HIDDEN).double().unbind()
    reference = nn.Sequential(*(Layer([WholeLinear(one) for one in four], Device(), SEQ) for four in weights))
    scheme = make(name, hosts, rank, find, Log())
    model = scheme.layers(weights, Device(), SEQ)
    whole_x, own_x = x.clone().requires_grad_(), scheme.cut(x).requires_grad_()
    whole_y, own_y = reference(whole_x), model(own_x)
    whole_y.backward(gradient)
    own_y.backward(scheme.cut(gradient))
    errors = [_error(own_y, scheme.cut(whole_y.detach())), _error(own_x.grad, scheme.cut(_of(whole_x)))]
    for index, (own, whole) in enumerate(zip(model.parameters(), reference.parameters(), strict=True)):
        errors.append(_error(own.grad, scheme.cut_weight(index % 4, _of(whole))))
    return max(errors)


def _of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _error(actual: Tensor | None, expected: Tensor) -> float:
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    return float((actual.detach() - expected).abs().max() / expected.abs().max())
