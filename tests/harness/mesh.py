"""Makes a mesh of all ranks of a test, and counts the bytes that its collectives move."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hanayo.overlap.link_queue import LinkQueue, Work
from lightning_hanayo.tensor_parallel.mesh import Mesh, MeshAxis, Pending

Sizes = tuple[int, int, int]

MESH_SIZES: tuple[Sizes, ...] = ((2, 2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 4), (4, 1, 1), (1, 4, 1), (2, 3, 1))


class CountingAxis(MeshAxis):
    """Counts the bytes that each rank receives, per kind of collective, with the optimal algorithm."""

    received: "Counter[str]" = Counter()

    def _count(self, kind: str, nbytes: int) -> None:
        if self.size > 1:
            CountingAxis.received[kind] += nbytes

    def gather_into(self, wholes: Sequence[Tensor], tensors: Sequence[Tensor]) -> Work:
        self._count("gather", sum(tensor.nbytes for tensor in tensors) * (self.size - 1))
        return super().gather_into(wholes, tensors)

    def reduce_scatter_each(self, parts: Sequence[Tensor]) -> Pending[list[Tensor]]:
        self._count("scatter", sum(one.nbytes for one in parts) // self.size * (self.size - 1))
        before = CountingAxis.received["exchange"]
        pending = super().reduce_scatter_each(parts)
        CountingAxis.received["exchange"] = before  # gloo's reduce-scatter is an all-to-all
        return pending

    def all_to_all(self, parts: Tensor) -> Pending[Tensor]:
        self._count("exchange", parts.nbytes // self.size * (self.size - 1))
        counted = CountingAxis.received.copy()
        pending = super().all_to_all(parts)
        CountingAxis.received = counted  # it exchanges one row with each rank
        return pending

    def exchange_rows(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending[Tensor]:
        others = sum(received) - received[self.rank] if self.size > 1 else 0
        self._count("rows", others * tensor.new_empty(tensor.shape[1:]).nbytes)
        return super().exchange_rows(tensor, sent, received)

    def all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending[Tensor]:
        if operation is dist.ReduceOp.SUM:
            self._count("reduce", 2 * tensor.nbytes // self.size * (self.size - 1))
        return super().all_reduce(tensor, operation)


@contextmanager
def process_group() -> Iterator[None]:
    """A gloo process group of all ranks; several meshes can be made in it."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_mesh(sizes: Sizes, queue: LinkQueue | None = None) -> Mesh:
    """A mesh of all ranks that counts its traffic. It has seven process groups, so use one mesh for many cases."""
    return Mesh.create(sizes, CountingAxis, queue)


def part(full: Tensor, mesh: Mesh, *axes: str) -> Tensor:
    """This rank's shard of a tensor whose dimensions are split evenly over the mesh axes `axes`; "" for no split."""
    for dim, names in enumerate(axes):
        if names:
            full = full.chunk(mesh.size(names), dim)[mesh.index(names)]
    return full.contiguous()


def error(actual: Tensor | None, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value; infinite if the shapes differ."""
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    largest = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    return float((actual.detach() - expected).abs().max() / largest)
