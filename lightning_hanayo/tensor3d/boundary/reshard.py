"""Reshards tensors at the ends of the stack, between the layout of the user's code and the 3-D layout of the blocks.

outside      [own samples, seq, h]            each rank has its share of the micro-batch, with all features
in blocks    [samples of x, seq/y, h/z]       the residual stream; masks and tables are [samples of x, ...]

One all-to-all over the (y, z) plane each way. Shares of different sizes are padded to the largest before it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.tensor3d.boundary.sample_shares import Share, block_shares
from lightning_hanayo.tensor3d.collectives import (
    all_gather,
    all_gather_replicated,
    all_to_all,
    local_shard,
    padded,
    split_dim,
)
from lightning_hanayo.tensor3d.mesh import Mesh, MeshAxis


@dataclass(frozen=True)
class StreamDims:
    """The dimensions of the residual stream: [batch, seq, h], or [seq, batch, h]."""

    batch_dim: int = 0
    sequence_dim: int = 1


class Reshard(ABC):
    """How one rank's tensors are resharded. All ranks of the cube call its methods together, in the main thread.

    Without `stream_dims` the blocks are generic and keep the layout outside, where `batch_dim` is the dimension of the
    samples in tensors that have it.
    """

    def __init__(self, mesh: Mesh, stream_dims: StreamDims | None, batch_dim: int = 0) -> None:
        self.mesh = mesh
        self.stream_dims = stream_dims
        self.batch_dim = batch_dim
        self._plane = mesh.axis("yz")
        self._plane_of_arguments = mesh.unqueued_axis("yz")
        """masks, for instance, come only with samples that need them"""

    @abstractmethod
    def stream_in(self, x: Tensor, shares: Sequence[Share]) -> Tensor:
        """Reshard a residual stream for the blocks."""

    @abstractmethod
    def stream_out(self, x: Tensor, shares: Sequence[Share], sequence_length: int) -> Tensor:
        """Reshard a residual stream of `sequence_length` positions for the code behind the blocks."""

    @abstractmethod
    def argument_in(self, x: Tensor, shares: Sequence[Share], *, is_batch: bool) -> Tensor:
        """Reshard another argument of a block, which has something for each sample, or is the same for all."""


class SharedReshard(Reshard):
    """For ranks each of which works on its own share outside."""

    @override
    def stream_in(self, x: Tensor, shares: Sequence[Share]) -> Tensor:
        if self.stream_dims is None:
            return x
        batch, sequence = self.stream_dims.batch_dim, self.stream_dims.sequence_dim
        sizes = self._sizes(shares)
        parts = padded(x, batch, max(sizes)).unsqueeze(0)
        for axis, dim in (("z", -1), ("y", sequence + 1)):  # [1, ..] to [y z, .., seq/y, .., h/z]
            parts = split_dim(parts, self.mesh.size(axis), dim).flatten(0, 1)
        return _join_valid(all_to_all(parts, self._plane), batch, sizes)

    @override
    def stream_out(self, x: Tensor, shares: Sequence[Share], sequence_length: int) -> Tensor:
        if self.stream_dims is None:
            return x
        batch, sequence = self.stream_dims.batch_dim, self.stream_dims.sequence_dim
        sizes = self._sizes(shares)
        parts = torch.stack([padded(rows, batch, max(sizes)) for rows in x.split(sizes, batch)])
        received = all_to_all(parts, self._plane).unflatten(0, (self.mesh.size("y"), self.mesh.size("z")))
        whole = received.movedim(0, sequence + 1).flatten(sequence + 1, sequence + 2)  # [z, .., seq, .., h/z]
        whole = whole.movedim(0, -2).flatten(-2)
        own: Tensor = whole.narrow(sequence, 0, sequence_length).narrow(batch, 0, sizes[self._plane.rank])
        return own

    @override
    def argument_in(self, x: Tensor, shares: Sequence[Share], *, is_batch: bool) -> Tensor:
        if self.stream_dims is None or not is_batch or self._plane.size == 1:
            return x
        sizes = self._sizes(shares)
        return _join_valid(all_gather(padded(x, 0, max(sizes)).unsqueeze(0), self._plane_of_arguments, 0), 0, sizes)

    def _sizes(self, shares: Sequence[Share]) -> list[int]:
        """How many samples each rank of the plane has."""
        return [share.size for share in block_shares(tuple(shares), self.mesh)]


class ReplicatedReshard(Reshard):
    """For ranks that all work on the whole micro-batch outside: for the blocks each keeps its part of it."""

    @override
    def stream_in(self, x: Tensor, shares: Sequence[Share]) -> Tensor:
        if self.stream_dims is None:
            return self._samples_in(x, shares, self.sample_dim(x, shares) or 0)
        x = self._samples_in(x, shares, self.stream_dims.batch_dim)
        x = local_shard(x, self.mesh.axis("y"), self.stream_dims.sequence_dim)
        return local_shard(x, self.mesh.axis("z"), -1)

    @override
    def stream_out(self, x: Tensor, shares: Sequence[Share], sequence_length: int) -> Tensor:
        if self.stream_dims is None:
            return self._samples_out(x, shares, self.batch_dim if self.batch_dim < x.dim() else 0)
        x = all_gather_replicated(x, self.mesh.axis("z"), -1)
        x = all_gather_replicated(x, self.mesh.axis("y"), self.stream_dims.sequence_dim, sequence_length)
        return self._samples_out(x, shares, self.stream_dims.batch_dim)

    @override
    def argument_in(self, x: Tensor, shares: Sequence[Share], *, is_batch: bool) -> Tensor:
        return self._samples_in(x, shares, self.sample_dim(x, shares) or 0) if is_batch else x

    def sample_dim(self, x: Tensor, shares: Sequence[Share]) -> int | None:
        """Returns the dimension in which a block's argument has an entry for each sample of the micro-batch."""
        samples = sum(share.size for share in shares if not share.is_padding)
        dims = (self.batch_dim, 0) if self.stream_dims is None else (0,)
        return next((dim for dim in dims if dim < x.dim() and x.shape[dim] == samples), None)

    def _samples_in(self, x: Tensor, shares: Sequence[Share], dim: int) -> Tensor:
        """Returns the samples that this rank's blocks work on, or a padding sample if there is none."""
        axis, samples = self._samples(shares)
        largest = max(map(len, samples))
        order = [i for own in samples for i in (*own, *own[:1] * (largest - len(own)))]
        parts = local_shard(_rows(x, dim, order), axis, dim)
        return parts.narrow(dim, 0, len(samples[axis.rank]))

    def _samples_out(self, x: Tensor, shares: Sequence[Share], dim: int) -> Tensor:
        """Returns the whole micro-batch in its order, without padding samples."""
        axis, samples = self._samples(shares)
        if x.shape[dim] != len(samples[axis.rank]):
            raise UnsupportedError(
                f"the stack's output has the shape {tuple(x.shape)}, but {len(samples[axis.rank])} samples were "
                f"expected in dimension {dim}: with cube_outside='replicate' the blocks' arguments and outputs need "
                f"one row for each sample of the micro-batch. Register the blocks, or use cube_outside='share' if the "
                f"loss is a mean over samples that don't depend on each other."
            )
        largest = max(map(len, samples))
        position: dict[int, int] = {}
        for rank, own in enumerate(samples):
            for i, sample in enumerate(own):
                position.setdefault(sample, rank * largest + i)  # the first one isn't a padding sample
        together = all_gather_replicated(padded(x, dim, largest), axis, dim)
        return _rows(together, dim, [position[i] for i in sorted(position)])

    def _samples(self, shares: Sequence[Share]) -> tuple[MeshAxis, list[tuple[int, ...]]]:
        """Returns the axis that the blocks' samples are sharded along, and those of each rank on it."""
        if self.stream_dims is None:
            return self.mesh.axis("xyz"), [tuple(range(share.start, share.stop)) for share in shares]
        per_x = self.mesh.size("yz")
        rows = [shares[i : i + per_x] for i in range(0, len(shares), per_x)]
        real = [tuple(i for s in row if not s.is_padding for i in range(s.start, s.stop)) for row in rows]
        return self.mesh.axis("x"), [own or (0,) for own in real]


def _rows(x: Tensor, dim: int, order: Sequence[int]) -> Tensor:
    """Returns these rows along `dim`."""
    return x.index_select(dim, _index(tuple(order), x.device))


@lru_cache(maxsize=256)
def _index(order: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns an index on the device: made once per order, because its copy to the device is waited for.

    The first batch may be one of validation: what inference mode makes couldn't be saved for a backward.
    """
    with torch.inference_mode(False):
        return torch.tensor(order, device=device)


def _join_valid(parts: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """[ranks, .., largest, ..] joined along `dim`, without what pads the parts."""
    if all(size == parts.shape[dim + 1] for size in sizes):
        return parts.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)
