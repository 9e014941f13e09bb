"""Collectives as autograd functions: the backward of each is the collective that undoes it.

                         forward                                            backward
all_gather               [.., n, ..] each       -> [.., size * n, ..]       reduce-scatter
reduce_scatter           [.., size * n, ..]     -> [.., n, ..]              all-gather
all_to_all               [size, ...] for each   -> [size, ...] from each    all-to-all
all_gather_replicated    [.., n, ..] each       -> [.., size * n, ..]       own part
all_reduce               partial sums           -> their sum                the same gradient on all ranks

After `all_gather` each rank computes something else, so its gradients are partial sums. After `all_gather_replicated`
all ranks compute the same, so gradients are equal and nothing is summed.

The argument `size` is the true length of the dimension: parts of unequal length were padded to one length.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.tensor_parallel.mesh import Mesh, MeshAxis, Pending


def start_all_gather(x: Tensor, axis: MeshAxis, dim: int, size: int | None = None) -> Pending[Tensor]:
    """Start to gather the parts of dimension `dim` along `axis`."""
    if axis.size == 1:
        return Pending.done(x)
    pending = axis.all_gather(x)
    return Pending(None, lambda: _joined(pending.wait(), dim, size))


def start_all_gather_each(
    tensors: Sequence[Tensor], axis: MeshAxis, dim: int, sizes: Sequence[int | None]
) -> Pending[list[Tensor]]:
    """The same for several tensors in one collective."""
    if axis.size == 1:
        return Pending.done(list(tensors))
    wholes = [x.new_empty(axis.size, *x.shape) for x in tensors]
    work = axis.gather_into(wholes, tensors)
    return Pending(work, lambda: [_joined(whole, dim, size) for whole, size in zip(wholes, sizes, strict=True)])


def start_reduce_scatter(x: Tensor, axis: MeshAxis, dim: int) -> Pending[Tensor]:
    """Start to sum over `axis`. Each rank gets its part of dimension `dim`, which is padded to equal parts."""
    if axis.size == 1:
        return Pending.done(x)
    return axis.reduce_scatter(split_dim(x, axis.size, dim))


def start_reduce_scatter_each(tensors: list[Tensor], axis: MeshAxis, dim: int) -> Pending[list[Tensor]]:
    """The same for several tensors in one collective. They are taken out of the list, as copies of them are sent."""
    taken = (tensors.pop(0) for _ in range(len(tensors)))
    if axis.size == 1:
        return Pending.done(list(taken))
    return axis.reduce_scatter_each([split_dim(x, axis.size, dim) for x in taken])


def split_dim(x: Tensor, count: int, dim: int) -> Tensor:
    """[.., count * n, ..] to [count, .., n, ..], contiguous; padded with zeros where `count` doesn't divide."""
    dim %= x.dim()
    x = padded(x, dim, -(-x.shape[dim] // count) * count)
    shape = x.shape
    parts = x.view(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
    return parts.movedim(dim, 0).contiguous()


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Returns `x` with zeros appended in `dim`, up to `size`."""
    missing = size - x.shape[dim]
    return pad(x, (*(0, 0) * (x.dim() - 1 - dim), 0, missing)) if missing else x


def _joined(parts: Tensor, dim: int, size: int | None) -> Tensor:
    """[count, .., n, ..] to [.., count * n, ..], or to the first `size` of it."""
    dim %= parts.dim() - 1
    whole = parts.movedim(0, dim).flatten(dim, dim + 1)
    if size is not None and size < whole.shape[dim]:
        whole = whole.narrow(dim, 0, size)
    return whole


Start = Callable[[Tensor], Pending[Tensor]]
"""starts a collective"""


class _Collective(torch.autograd.Function):
    """Runs one collective, and on the gradient another one. Neither may hold the input, which would stay in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Start, start_backward: Start) -> Tensor:
        ctx.start_backward = start_backward
        return start(x).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.start_backward(gradient).wait(), None, None


def run(x: Tensor, axis: MeshAxis, start: Start, start_backward: Start) -> Tensor:
    """Run one collective, and on the gradient another one."""
    return x if axis.size == 1 else _Collective.apply(x, start, start_backward)


def all_gather(x: Tensor, axis: MeshAxis, dim: int, size: int | None = None) -> Tensor:
    """Gather dimension `dim` for ranks that compute different things with it."""
    return run(x, axis, lambda x: start_all_gather(x, axis, dim, size), lambda dy: start_reduce_scatter(dy, axis, dim))


def reduce_scatter(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Sum over `axis`, and return this rank's part of dimension `dim` of the sum."""
    size = x.shape[dim]
    return run(x, axis, lambda x: start_reduce_scatter(x, axis, dim), lambda dy: start_all_gather(dy, axis, dim, size))


def all_to_all(parts: Tensor, axis: MeshAxis) -> Tensor:
    """[size, ...], whose i-th part goes to rank i, to [size, ...], whose i-th part came from rank i."""
    return run(parts, axis, axis.all_to_all, axis.all_to_all)


def all_gather_replicated(x: Tensor, axis: MeshAxis, dim: int, size: int | None = None) -> Tensor:
    """Gather dimension `dim` for ranks that all compute the same with it."""
    return run(x, axis, lambda x: start_all_gather(x, axis, dim, size), lambda dy: _own_part(dy, axis, dim))


def all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """Sum over `axis` for ranks that all compute the same with the sum."""
    contiguous = torch.contiguous_format
    return run(x, axis, lambda x: axis.all_reduce(x.clone(memory_format=contiguous)), lambda dy: Pending.done(dy))


def _own_part(x: Tensor, axis: MeshAxis, dim: int) -> Pending[Tensor]:
    return Pending.done(split_dim(x, axis.size, dim)[axis.rank].clone())


END = 0
"""the number in place of a layer's where a stage's blocks end"""


class CallOrder:
    """Checks that all ranks of a mesh call the same layers of a stage in the same order, where user code calls them.

        rank 0    experts[0]   experts[2]   end      each call begins with the maximum over all ranks of n and of -n,
        rank 1    experts[0]   experts[1]   ...      n is the layer's number: in the second column 3 and -2, two layers

    Without the check they would wait for each other, or gather parts of two weights as if they were one.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._layers: list[nn.Module] = []
        self._options: dict[int, str] = {}

    def add(self, layer: nn.Module, option: str | None = None) -> int:
        """Returns the layer's number. All ranks add the same layers in the same order.

        `option`: the one of `HanayoStrategy` that leaves the layer out; None: `cube_exclude`.
        """
        self._layers.append(layer)
        if option is not None:
            self._options[len(self._layers)] = option
        return len(self._layers)

    @property
    def num_layers(self) -> int:
        """How many were added."""
        return len(self._layers)

    def check(self, number: int, count: int = 0) -> int:
        """This rank calls the layer `number`, or ends the last block. Returns the largest `count` of all ranks.

        Raises:
            UnsupportedError: another rank calls another layer.
        """
        highest, lowest, largest = self._mesh.largest([number, -number, count])
        if highest != -lowest:
            other = highest if highest != number else -lowest
            called = number if number != END else other
            layer = self._name(called)
            words = [word for word in layer.split(".") if not word.isdigit()]
            own, others = ("calls no further layer" if n == END else f"calls {self._name(n)}" for n in (number, other))
            option = self._options.get(called, f"cube_exclude=({words[-1]!r},)")
            raise UnsupportedError(
                f"this rank {own}, while another rank of its cube {others}. All must call the same layers in the same "
                f"order. Leave those out that some samples skip: HanayoStrategy({option})."
            )
        return largest

    def _name(self, number: int) -> str:
        part = getattr(next(iter(self._layers[number - 1]._parameters.values())), "_part", None)
        return f"layer {number}" if part is None else str(part.name).rpartition(".")[0]
