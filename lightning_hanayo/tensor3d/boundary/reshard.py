"""The gate: where tensors of the user's code enter the 3-D layout of the blocks, and leave it.

outside      [own samples, seq, h]               a share of the micro-batch on each rank, features whole
inside       [samples of x, seq/y, h/z]          the residual stream; masks and tables [samples of x, ...]

One all-to-all over the (y, z) plane each way. Shares of different sizes are padded to the largest on the way.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.tensor3d.boundary.shares import Share, row_of
from lightning_hanayo.tensor3d.collectives import assemble, exchange, gather, padded, parts_of, take
from lightning_hanayo.tensor3d.mesh import Mesh, MeshAxis


@dataclass(frozen=True)
class Residual:
    """The dimensions of the residual stream: [batch, seq, h], or [seq, batch, h]."""

    batch_dim: int = 0
    sequence_dim: int = 1


class Reshard(ABC):
    """One rank's. All ranks of the cube pass it together, in the main thread.

    Args:
        grid: the cube.
        residual: the stream's dimensions; None where the blocks are of an unknown kind, and keep the outside's layout.
    """

    def __init__(self, grid: Mesh, residual: Residual | None) -> None:
        self.grid = grid
        self.residual = residual

    @abstractmethod
    def stream_in(self, x: Tensor, shares: Sequence[Share]) -> Tensor:
        """A residual stream, on its way in."""

    @abstractmethod
    def stream_out(self, x: Tensor, shares: Sequence[Share], length: int) -> Tensor:
        """A residual stream of `length` positions, on its way out."""

    @abstractmethod
    def argument_in(self, x: Tensor, shares: Sequence[Share], *, is_batch: bool) -> Tensor:
        """What else a block gets: for each sample, or the same for all."""


class SharedReshard(Reshard):
    """Outside, each rank works on its share."""

    def __init__(self, grid: Mesh, residual: Residual | None) -> None:
        super().__init__(grid, residual)
        self._plane = grid.axis("yz")

    @override
    def stream_in(self, x: Tensor, shares: Sequence[Share]) -> Tensor:
        if self.residual is None:
            return x
        batch, sequence = self.residual.batch_dim, self.residual.sequence_dim
        sizes = self._sizes(shares)
        parts = padded(x, batch, max(sizes)).unsqueeze(0)
        for axis, dim in (("z", -1), ("y", sequence + 1)):  # [1, ..] to [y z, .., seq/y, .., h/z]
            parts = parts_of(parts, self.grid.size(axis), dim).flatten(0, 1)
        return _valid(exchange(parts, self._plane), batch, sizes)

    @override
    def stream_out(self, x: Tensor, shares: Sequence[Share], length: int) -> Tensor:
        if self.residual is None:
            return x
        batch, sequence = self.residual.batch_dim, self.residual.sequence_dim
        sizes = self._sizes(shares)
        parts = torch.stack([padded(rows, batch, max(sizes)) for rows in x.split(sizes, batch)])
        arrived = exchange(parts, self._plane).unflatten(0, (self.grid.size("y"), self.grid.size("z")))
        whole = arrived.movedim(0, sequence + 1).flatten(sequence + 1, sequence + 2)  # [z, .., seq, .., h/z]
        whole = whole.movedim(0, -2).flatten(-2)
        own: Tensor = whole.narrow(sequence, 0, length).narrow(batch, 0, sizes[self._plane.place])
        return own

    @override
    def argument_in(self, x: Tensor, shares: Sequence[Share], *, is_batch: bool) -> Tensor:
        if self.residual is None or not is_batch or self._plane.size == 1:
            return x
        sizes = self._sizes(shares)
        return _valid(gather(padded(x, 0, max(sizes)).unsqueeze(0), self._plane, 0), 0, sizes)

    def _sizes(self, shares: Sequence[Share]) -> list[int]:
        """Samples of each rank of the plane."""
        return [share.size for share in row_of(tuple(shares), self.grid)]


class ReplicatedReshard(Reshard):
    """Outside, all ranks work on the whole micro-batch: inside, each takes its part of what it has already."""

    @override
    def stream_in(self, x: Tensor, shares: Sequence[Share]) -> Tensor:
        if self.residual is None:
            return self._samples_in(x, shares, 0)
        x = self._samples_in(x, shares, self.residual.batch_dim)
        x = take(x, self.grid.axis("y"), self.residual.sequence_dim)
        return take(x, self.grid.axis("z"), -1)

    @override
    def stream_out(self, x: Tensor, shares: Sequence[Share], length: int) -> Tensor:
        if self.residual is None:
            return self._samples_out(x, shares, 0)
        x = assemble(x, self.grid.axis("z"), -1)
        x = assemble(x, self.grid.axis("y"), self.residual.sequence_dim, length)
        return self._samples_out(x, shares, self.residual.batch_dim)

    @override
    def argument_in(self, x: Tensor, shares: Sequence[Share], *, is_batch: bool) -> Tensor:
        return self._samples_in(x, shares, 0) if is_batch else x

    def _samples_in(self, x: Tensor, shares: Sequence[Share], dim: int) -> Tensor:
        """The samples that this rank's blocks work on; a ghost where there is none."""
        axis, samples = self._samples(shares)
        largest = max(map(len, samples))
        order = [i for own in samples for i in (*own, *own[:1] * (largest - len(own)))]
        parts = take(x.index_select(dim, torch.tensor(order, device=x.device)), axis, dim)
        return parts.narrow(dim, 0, len(samples[axis.place]))

    def _samples_out(self, x: Tensor, shares: Sequence[Share], dim: int) -> Tensor:
        """The whole micro-batch again, in its order; ghosts are left out."""
        axis, samples = self._samples(shares)
        largest = max(map(len, samples))
        where: dict[int, int] = {}
        for place, own in enumerate(samples):
            for i, sample in enumerate(own):
                where.setdefault(sample, place * largest + i)  # the first one is the real one
        together = assemble(padded(x, dim, largest), axis, dim)
        return together.index_select(dim, torch.tensor([where[i] for i in sorted(where)], device=x.device))

    def _samples(self, shares: Sequence[Share]) -> tuple[MeshAxis, list[tuple[int, ...]]]:
        """Along which axis the samples are spread inside, and those of each place on it."""
        if self.residual is None:
            return self.grid.axis("xyz"), [tuple(range(share.start, share.stop)) for share in shares]
        per_row = self.grid.size("yz")
        rows = [shares[i : i + per_row] for i in range(0, len(shares), per_row)]
        real = [tuple(i for s in row if not s.is_ghost for i in range(s.start, s.stop)) for row in rows]
        return self.grid.axis("x"), [own or (0,) for own in real]


def _valid(parts: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """[ranks, .., largest, ..] side by side in `dim`, without what pads them."""
    if all(size == parts.shape[dim + 1] for size in sizes):
        return parts.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)
