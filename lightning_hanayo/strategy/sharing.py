"""The sharing: who plays which samples of a batch outside the stack, and how what they return becomes one again.

alone       micro-batch 0 | micro-batch 1 | ...                    each whole, on the one rank that holds the stage
a cube      0: rank 0's share | rank 1's | ...  1: rank 0's | ...  each rank plays its own part of each micro-batch
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_hanayo.runtime import microbatches
from lightning_hanayo.tensor3d.boundary.admission import Admission, Agree
from lightning_hanayo.tensor3d.boundary.shares import Share, row_of, shares
from lightning_hanayo.tensor3d.mesh import Mesh


@dataclass(frozen=True)
class Split:
    """A batch cut into pieces.

    Args:
        pieces: in the order of their samples; None where a rank has none.
        sizes: their samples.
        own: for each micro-batch, which piece is this rank's.
        played: what this rank's user code gets for each micro-batch: its piece, or a ghost.
        rows: for each micro-batch, the samples that this rank's blocks work on.
    """

    pieces: Sequence[Any]
    sizes: Sequence[int]
    own: Sequence[int]
    played: Sequence[Any]
    rows: Sequence[Any]


class Sharing(ABC):
    """One rank's."""

    @abstractmethod
    def split(self, batch: Any, parts: Sequence[int]) -> Split:
        """Cut `batch` into micro-batches of `parts` samples, and these into this rank's and others' pieces."""

    @abstractmethod
    def collect(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of their pieces. Called by all of them."""

    def merge(self, results: Sequence[Any], split: Split, weights: Sequence[float], *, has_loss: bool) -> Any:
        """What the step has returned for each of this rank's pieces, and elsewhere for the others', as one.

        `has_loss` says whether it was a training step.
        """
        everybody = self.collect(list(results))
        made = [result for row in zip(*everybody, strict=True) for result in row]
        kept = [i for i, size in enumerate(split.sizes) if size]
        return microbatches.merge(
            [made[i] for i in kept],
            [split.sizes[i] for i in kept],
            [weights[i] for i in kept],
            has_loss=has_loss,
        )


class Alone(Sharing):
    """A rank that holds its stages by itself."""

    @override
    def split(self, batch: Any, parts: Sequence[int]) -> Split:
        pieces = microbatches.split(batch, parts)
        return Split(pieces, parts, range(len(parts)), pieces, pieces)

    @override
    def collect(self, value: Any) -> list[Any]:
        return [value]


class Replicated(Alone):
    """Ranks of a cube that all play whole micro-batches outside, alike."""

    def __init__(self, grid: Mesh, passage: Admission) -> None:
        self._grid = grid
        self._passage = passage

    @override
    def split(self, batch: Any, parts: Sequence[int]) -> Split:
        self._passage.begin([shares(samples, self._grid.sizes) for samples in parts])
        return super().split(batch, parts)


class Shared(Sharing):
    """Ranks of a cube, each of which plays its share.

    Args:
        grid: the cube.
        passage: is told the shares.
        agree: among all ranks of the cube.
    """

    def __init__(self, grid: Mesh, passage: Admission, agree: Agree) -> None:
        self._grid = grid
        self._passage = passage
        self._agree = agree

    @override
    def split(self, batch: Any, parts: Sequence[int]) -> Split:
        whole = microbatches.split(batch, parts)
        table = [shares(samples, self._grid.sizes) for samples in parts]
        self._passage.begin(table)
        place, count = self._grid.index("xyz"), self._grid.num_ranks

        def cut(m: int, *played: Share) -> Any:
            samples = [i for share in played for i in range(share.start, share.stop)]
            return microbatches.part(whole[m], samples, parts[m])

        pieces = [None if share.is_ghost else cut(m, share) for m, row in enumerate(table) for share in row]
        own = [m * count + place for m in range(len(parts))]
        return Split(
            pieces,
            [0 if share.is_ghost else share.size for row in table for share in row],
            own,
            [cut(m, row[place]) if pieces[own[m]] is None else pieces[own[m]] for m, row in enumerate(table)],
            [cut(m, *row_of(row, self._grid)) for m, row in enumerate(table)],
        )

    @override
    def collect(self, value: Any) -> list[Any]:
        return self._agree(value)
