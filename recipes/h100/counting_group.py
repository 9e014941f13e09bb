"""A process group that moves nothing, and counts what a native group (NCCL's) would be asked for."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.tensor_parallel.mesh import Mesh, MeshAxis


class Tally:
    """Collectives, and the bytes that they bring to one rank by the optimal algorithm."""

    def __init__(self) -> None:
        self.collectives = self.received = 0


class CountingGroup:
    """Takes the place of one rank's group of `size` ranks. Results keep what was in their memory."""

    def __init__(self, tally: Tally, size: int) -> None:
        self._tally = tally
        self._size = size

    def _allgather_base(self, whole: Tensor, own: Tensor) -> "CountingGroup":
        return self.allgather_into_tensor_coalesced([whole], [own])

    def allgather_into_tensor_coalesced(self, wholes: Sequence[Tensor], own: Sequence[Tensor]) -> "CountingGroup":
        """One collective, as over NCCL."""
        return self._count(wholes, 1)

    def _reduce_scatter_base(self, own: Tensor, whole: Tensor, options: Any) -> "CountingGroup":
        return self.reduce_scatter_tensor_coalesced([own], [whole], options)

    def reduce_scatter_tensor_coalesced(
        self, own: Sequence[Tensor], wholes: Sequence[Tensor], options: Any
    ) -> "CountingGroup":
        """One collective, as over NCCL."""
        return self._count(wholes, 1)

    def alltoall_base(self, received: Tensor, sent: Tensor, *sizes: Any) -> "CountingGroup":
        """Each rank keeps its own part."""
        return self._count([received], 1)

    def allreduce(self, tensors: Sequence[Tensor], *options: Any) -> "CountingGroup":
        """A reduce-scatter and an all-gather."""
        return self._count(tensors, 2)

    def wait(self) -> None:
        """Return at once: nothing is under way."""

    def _count(self, wholes: Sequence[Tensor], times: int) -> "CountingGroup":
        self._tally.collectives += 1
        self._tally.received += times * sum(whole.nbytes for whole in wholes) * (self._size - 1) // self._size
        return self


class _CountingAxis(MeshAxis):
    """Takes its group for a native one."""

    def __init__(self, group: Any, size: int, rank: int, **_: Any) -> None:
        super().__init__(None, size, rank)
        self.group = self._native = group


def counting_mesh(sizes: MeshSizes, tally: Tally) -> Mesh:
    """The mesh as its rank 0 sees it, without other ranks."""
    one = Mesh(sizes, (0, 0, 0), {})
    return Mesh.of(sizes, 0, lambda names: CountingGroup(tally, one.size(names)), _CountingAxis)  # type: ignore[arg-type,return-value]
