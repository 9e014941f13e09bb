"""A cube: a grid of all ranks of a test's world, and what crosses its axes, counted."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hanayo.tensor3d.mesh import Mesh, MeshAxis, Pending

Sizes = tuple[int, int, int]

MESH_SIZES: tuple[Sizes, ...] = ((2, 2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 4), (4, 1, 1), (1, 4, 1), (2, 3, 1))


class CountingAxis(MeshAxis):
    """Counts what each rank receives, in bytes, as the best algorithm would move it: by kind of collective."""

    received: "Counter[str]" = Counter()

    def _count(self, kind: str, nbytes: int) -> None:
        if self.size > 1:
            CountingAxis.received[kind] += nbytes

    def all_gather(self, tensor: Tensor) -> Pending:
        self._count("gather", tensor.nbytes * (self.size - 1))
        return super().all_gather(tensor)

    def reduce_scatter(self, parts: Tensor) -> Pending:
        self._count("scatter", parts.nbytes // self.size * (self.size - 1))
        before = CountingAxis.received["exchange"]
        pending = super().reduce_scatter(parts)
        CountingAxis.received["exchange"] = before  # gloo's way of doing it
        return pending

    def all_to_all(self, parts: Tensor) -> Pending:
        self._count("exchange", parts.nbytes // self.size * (self.size - 1))
        return super().all_to_all(parts)

    def all_reduce(self, tensor: Tensor) -> Pending:
        self._count("reduce", 2 * tensor.nbytes // self.size * (self.size - 1))
        return super().all_reduce(tensor)


@contextmanager
def process_group() -> Iterator[None]:
    """gloo among all ranks of the run; several grids may be made in it."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_mesh(sizes: Sizes) -> Mesh:
    """A grid of all ranks, whose traffic is counted: seven groups, so one for many cases."""
    return Mesh.create(sizes, CountingAxis)


def part(whole: Tensor, grid: Mesh, *axes: str) -> Tensor:
    """This rank's part of a tensor whose dimensions are cut evenly along `axes`, "" for none."""
    for dim, names in enumerate(axes):
        if names:
            whole = whole.chunk(grid.size(names), dim)[grid.index(names)]
    return whole.contiguous()


def error(actual: Tensor | None, expected: Tensor) -> float:
    """The largest difference, in units of the largest expected value; infinite where shapes differ."""
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    largest = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    return float((actual.detach() - expected).abs().max() / largest)
