"""Which samples of a micro-batch each rank of a cube works on outside the stack.

11 samples, mesh (2, 2, 2):     x = 0: 6 = 2 + 2 + 1 + 1        x = 1: 5 = 2 + 1 + 1 + 1
 2 samples                      x = 0: 1 = 1 + 0 + 0 + 0        x = 1: 1 = 1 + 0 + 0 + 0

A rank without a sample gets the micro-batch's first one as a padding sample: it runs the same code, but its results
don't count.
"""

from dataclasses import dataclass

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.tensor3d.mesh import Mesh


@dataclass(frozen=True)
class Share:
    """Samples `start` to `stop`, which isn't one of them, of a micro-batch. A padding sample doesn't count."""

    start: int
    stop: int
    is_padding: bool = False

    @property
    def size(self) -> int:
        """How many samples the rank runs."""
        return self.stop - self.start


def shares(num_samples: int, sizes: MeshSizes) -> tuple[Share, ...]:
    """Returns the share of every rank of the cube, in rank order."""
    per_x = sizes[1] * sizes[2]
    return tuple(
        Share(start, stop) if stop > start else Share(0, 1, is_padding=True)
        for of_x in _even_parts(0, num_samples, sizes[0])
        for start, stop in _even_parts(*of_x, per_x)
    )


def block_shares(all_shares: tuple[Share, ...], mesh: Mesh) -> tuple[Share, ...]:
    """Returns the shares that this rank's blocks work on: those of all ranks with this rank's x."""
    per_x = mesh.size("yz")
    first = mesh.index("x") * per_x
    return all_shares[first : first + per_x]


def _even_parts(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """`count` contiguous parts, whose sizes differ by at most one, larger ones first."""
    size, extra = divmod(stop - start, count)
    edges = [start + i * size + min(i, extra) for i in range(count + 1)]
    return list(zip(edges, edges[1:], strict=False))
