"""Checks that a model's sizes divide over the axes of a 3-D mesh, and finds the meshes for which they do."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, prod

from lightning_hanayo.errors import HanayoError

MeshSizes = tuple[int, int, int]
"""how many ranks a mesh has along x, y and z"""


@dataclass(frozen=True)
class Divisibility:
    """A size that must divide over some axes of the mesh.

    Args:
        layer: the layer that has the size, by the name that the user knows: "blocks.0.attention".
        what: what is counted: "heads", "features".
        size: how many there are.
        axes: the axes over which they are sharded, as "yz".
    """

    layer: str
    what: str
    size: int
    axes: str

    def holds(self, mesh: MeshSizes) -> bool:
        """Returns whether the size divides over a mesh of these sizes."""
        return self.size % self.num_parts(mesh) == 0

    def num_parts(self, mesh: MeshSizes) -> int:
        """Returns by how many the size must be divisible."""
        return prod(mesh["xyz".index(axis)] for axis in self.axes)


def meshes(num_ranks: int) -> tuple[MeshSizes, ...]:
    """Returns all meshes of so many ranks.

    Example:
        >>> meshes(2)
        ((1, 1, 2), (1, 2, 1), (2, 1, 1))
    """
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    return tuple((x, y, num_ranks // (x * y)) for x in divisors for y in divisors if num_ranks % (x * y) == 0)


def meshes_that_fit(num_ranks: int, required: Sequence[Divisibility]) -> tuple[MeshSizes, ...]:
    """Returns the meshes of so many ranks over which all required sizes divide."""
    return tuple(mesh for mesh in meshes(num_ranks) if all(one.holds(mesh) for one in required))


def check_divisibility(required: Sequence[Divisibility], mesh: MeshSizes) -> None:
    """Check that all required sizes divide over a mesh of these sizes.

    Raises:
        HanayoError: one doesn't. The message names the layer, the size, the axes, and the nearest meshes that fit.
    """
    wrong = [one for one in required if not one.holds(mesh)]
    if not wrong:
        return
    others = f" ({len(wrong) - 1} more like this)" if len(wrong) > 1 else ""

    def distance(other: MeshSizes) -> float:
        """By how much the axes grow and shrink. Halving an axis counts as much as doubling it."""
        return round(sum(abs(log(a / b)) for a, b in zip(mesh, other, strict=True)), 9)

    fitting = sorted(meshes_that_fit(prod(mesh), required), key=distance)[:3]
    way_out = f"Meshes of {prod(mesh)} ranks that fit: {', '.join(map(str, fitting))}."
    if not fitting:
        way_out = f"No mesh of {prod(mesh)} ranks fits; try a cube of another size."
    one = wrong[0]
    doesnt = f"which don't divide over {' * '.join(one.axes)} = {one.num_parts(mesh)}"
    raise HanayoError(
        f"{one.layer} has {one.size} {one.what}, {doesnt} in the mesh (x, y, z) = {mesh}{others}. {way_out}"
    )
