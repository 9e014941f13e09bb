"""The shares: which samples of a micro-batch each rank of a cube works on outside the stack.

11 samples, grid (2, 2, 2):     x = 0: 6 = 2 + 2 + 1 + 1        x = 1: 5 = 2 + 1 + 1 + 1
 2 samples                      x = 0: 1 = 1 + 0 + 0 + 0        x = 1: 1 = 1 + 0 + 0 + 0

A rank without a sample plays the micro-batch's first one as a ghost: in the same code, at the same time, for nothing.
"""

from dataclasses import dataclass

from lightning_hanayo.tensor3d.mesh import Mesh


@dataclass(frozen=True)
class Share:
    """Samples `start` to `stop` of a micro-batch; none of them counts if it is a ghost."""

    start: int
    stop: int
    is_ghost: bool = False

    @property
    def size(self) -> int:
        """How many samples are played."""
        return self.stop - self.start


def shares(num_samples: int, sizes: tuple[int, int, int]) -> tuple[Share, ...]:
    """The share of every rank of the cube, in rank order."""
    per_row = sizes[1] * sizes[2]
    rows = _parts(0, num_samples, sizes[0])
    return tuple(
        Share(start, stop) if stop > start else Share(0, 1, is_ghost=True)
        for row in rows
        for start, stop in _parts(*row, per_row)
    )


def row_of(all_shares: tuple[Share, ...], grid: Mesh) -> tuple[Share, ...]:
    """Those of the ranks that differ along y and z alone: together the samples that a rank's blocks work on."""
    per_row = grid.size("yz")
    first = grid.index("x") * per_row
    return all_shares[first : first + per_row]


def _parts(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """`count` runs, larger ones first; they differ by at most one."""
    size, extra = divmod(stop - start, count)
    edges = [start + i * size + min(i, extra) for i in range(count + 1)]
    return list(zip(edges, edges[1:], strict=False))
