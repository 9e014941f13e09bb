"""Cuts a batch into micro-batches, and in a cube into each rank's share of them; merges what their steps return.

one rank per stage   micro-batch 0 | micro-batch 1 | ...                  each whole
a cube               0: rank 0's share | rank 1's | ... 1: rank 0's | ... each rank runs user code on its own share
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_hanayo.runtime import microbatches
from lightning_hanayo.tensor3d.boundary.microbatch_reshard import AllGatherObject, MicrobatchReshard
from lightning_hanayo.tensor3d.boundary.sample_shares import Share, block_shares, shares
from lightning_hanayo.tensor3d.mesh import Mesh


@dataclass(frozen=True)
class SplitBatch:
    """A batch cut into pieces. A piece is a micro-batch, or in a cube one rank's share of a micro-batch."""

    microbatch_sizes: Sequence[int]
    """samples of each micro-batch"""
    pieces: Sequence[Any]
    """in the order of their samples; None where a rank has none"""
    sizes: Sequence[int]
    """samples of each piece"""
    own: Sequence[int]
    """for each micro-batch, which piece is this rank's"""
    step_inputs: Sequence[Any]
    """what this rank's user code gets for each micro-batch: its piece, or a padding sample"""
    block_inputs: Sequence[Any]
    """for each micro-batch, the samples that this rank's blocks work on"""


class BatchSplitter(ABC):
    """Splits batches on a process of pipeline rank 0 (one per rank of the cube), and merges what their steps return."""

    @abstractmethod
    def split(self, batch: Any, sizes: Sequence[int]) -> SplitBatch:
        """Cut `batch` into micro-batches of so many samples, and these into the ranks' pieces."""

    @abstractmethod
    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of their pieces. Called by all of them."""

    def merge(self, results: Sequence[Any], split: SplitBatch, weights: Sequence[float], *, has_loss: bool) -> Any:
        """Merge what the step returned for the pieces of this rank and of the others that share the micro-batches.

        Args:
            results: this rank's, one per micro-batch.
            split: the batch.
            weights: of each piece.
            has_loss: whether it was a training step.
        """
        per_microbatch = zip(*self.all_gather(list(results)), strict=True)
        per_piece = [result for row in per_microbatch for result in row]
        kept = [i for i, size in enumerate(split.sizes) if size]
        return microbatches.merge(
            [per_piece[i] for i in kept],
            [split.sizes[i] for i in kept],
            [weights[i] for i in kept],
            has_loss=has_loss,
        )


class WholeSplitter(BatchSplitter):
    """For a rank that holds its stages alone: it runs whole micro-batches."""

    @override
    def split(self, batch: Any, sizes: Sequence[int]) -> SplitBatch:
        pieces = microbatches.split(batch, sizes)
        return SplitBatch(sizes, pieces, sizes, range(len(sizes)), pieces, pieces)

    @override
    def all_gather(self, value: Any) -> list[Any]:
        return [value]


class ReplicatedSplitter(WholeSplitter):
    """For the ranks of a cube that all run whole micro-batches outside the stack, alike."""

    def __init__(self, mesh: Mesh, boundary: MicrobatchReshard) -> None:
        self._mesh = mesh
        self._boundary = boundary

    @override
    def split(self, batch: Any, sizes: Sequence[int]) -> SplitBatch:
        self._boundary.begin([shares(samples, self._mesh.sizes) for samples in sizes])
        return super().split(batch, sizes)


class SharedSplitter(BatchSplitter):
    """For the ranks of a cube of which each runs user code on its share of every micro-batch.

    Args:
        mesh: the cube.
        boundary: is told the shares.
        all_gather: gathers Python objects from all ranks of the cube.
    """

    def __init__(self, mesh: Mesh, boundary: MicrobatchReshard, all_gather: AllGatherObject) -> None:
        self._mesh = mesh
        self._boundary = boundary
        self._all_gather = all_gather

    @override
    def split(self, batch: Any, sizes: Sequence[int]) -> SplitBatch:
        whole = microbatches.split(batch, sizes)
        table = [shares(samples, self._mesh.sizes) for samples in sizes]
        self._boundary.begin(table)
        rank, num_ranks = self._mesh.index("xyz"), self._mesh.num_ranks

        def cut(m: int, *parts: Share) -> Any:
            samples = [i for share in parts for i in range(share.start, share.stop)]
            return microbatches.select_samples(whole[m], samples, sizes[m])

        pieces = [None if share.is_padding else cut(m, share) for m, row in enumerate(table) for share in row]
        own = [m * num_ranks + rank for m in range(len(sizes))]
        return SplitBatch(
            sizes,
            pieces,
            [0 if share.is_padding else share.size for row in table for share in row],
            own,
            [cut(m, row[rank]) if pieces[own[m]] is None else pieces[own[m]] for m, row in enumerate(table)],
            [cut(m, *block_shares(row, self._mesh)) for m, row in enumerate(table)],
        )

    @override
    def all_gather(self, value: Any) -> list[Any]:
        return self._all_gather(value)
