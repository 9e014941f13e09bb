"""The fit: sizes that must divide over axes of the grid, and the grids over which they would."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log, prod

from lightning_hanayo.errors import HanayoError

Grid3 = tuple[int, int, int]


@dataclass(frozen=True)
class Divisibility:
    """`size` of `what` in the layer `where` must divide over `axes`."""

    where: str
    what: str
    size: int
    axes: str

    def holds(self, sizes: Grid3) -> bool:
        """Over a grid of these sizes."""
        return self.size % self._parts(sizes) == 0

    def _parts(self, sizes: Grid3) -> int:
        return prod(sizes["xyz".index(axis)] for axis in self.axes)

    def complaint(self, sizes: Grid3) -> str:
        """What is wrong."""
        axes = " * ".join(self.axes)
        return f"{self.where} has {self.size} {self.what}, which don't divide over {axes} = {self._parts(sizes)}"


def check(needs: Sequence[Divisibility], sizes: Grid3) -> None:
    """See that all `needs` hold over a grid of `sizes`.

    Raises:
        HanayoError: one doesn't. It names the layer, the size, the axes, and the nearest grids of as many ranks.
    """
    wrong = [need for need in needs if not need.holds(sizes)]
    if wrong:
        fitting = [grid for grid in _grids(prod(sizes)) if all(need.holds(grid) for need in needs)]
        nearest = sorted(fitting, key=lambda grid: _distance(grid, sizes))[:3]
        others = f" ({len(wrong) - 1} more like this)" if len(wrong) > 1 else ""
        way_out = f"Grids of {prod(sizes)} ranks that fit: {', '.join(map(str, nearest))}."
        if not nearest:
            way_out = f"No grid of {prod(sizes)} ranks fits; try a cube of another size."
        raise HanayoError(f"{wrong[0].complaint(sizes)} in the grid (x, y, z) = {sizes}{others}. {way_out}")


def _grids(ranks: int) -> Iterator[Grid3]:
    for x in _divisors(ranks):
        for y in _divisors(ranks // x):
            yield x, y, ranks // x // y


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _distance(one: Grid3, other: Grid3) -> float:
    return sum(abs(log(a / b)) for a, b in zip(one, other, strict=True))
