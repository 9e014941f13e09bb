"""The grids: which of them fit the sizes of a model's layers, and which one moves the least."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log, prod

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.volume import Grid, Keep, TransformerLayer


@dataclass(frozen=True)
class Requirement:
    """A size that has to divide over some axes.

    Args:
        layer: whose size it is, as the user knows it: "blocks.0.attention".
        what: the size's name: "heads", "hidden", "features".
        size: itself.
        axes: over which it is cut, as "yz".
    """

    layer: str
    what: str
    size: int
    axes: str

    def fits(self, grid: Grid) -> bool:
        """Whether it divides."""
        return self.size % self._parts(grid) == 0

    def broken_by(self, grid: Grid) -> str:
        """What to tell the user where it doesn't."""
        factors = " x ".join(str(_along(grid, axis)) for axis in self.axes)
        along = ", ".join(self.axes) + (f" ({factors})" if len(self.axes) > 1 else "")
        ranks = f"{self._parts(grid)} ranks along {along}"
        return f"{self.layer} has {self.what}={self.size}, which doesn't divide over {ranks}"

    def _parts(self, grid: Grid) -> int:
        return prod(_along(grid, axis) for axis in self.axes)


def _along(grid: Grid, axis: str) -> int:
    return grid["xyz".index(axis)]


def requirements_of(layer: TransformerLayer, name: str = "layer") -> tuple[Requirement, ...]:
    """What a Transformer layer needs, whose residual stream is cut along the sequence."""
    return (
        Requirement(name, "heads", layer.heads, "yz"),
        Requirement(name, "hidden", layer.hidden, "z"),
        Requirement(name, "features", layer.features, "yz"),
    )


def grids(num_ranks: int) -> tuple[Grid, ...]:
    """All grids of so many ranks.

    Example:
        >>> grids(2)
        ((1, 1, 2), (1, 2, 1), (2, 1, 1))
    """
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    return tuple((x, y, num_ranks // (x * y)) for x in divisors for y in divisors if num_ranks % (x * y) == 0)


def grids_that_fit(num_ranks: int, requirements: Iterable[Requirement]) -> tuple[Grid, ...]:
    """Those that meet all requirements."""
    needed = tuple(requirements)
    return tuple(grid for grid in grids(num_ranks) if all(one.fits(grid) for one in needed))


def nearest_grids(grid: Grid, requirements: Iterable[Requirement], count: int = 3) -> tuple[Grid, ...]:
    """Up to `count` that fit, the most like `grid` first: of as many ranks, or, if there are none, of fewer."""
    needed = tuple(requirements)
    for num_ranks in range(prod(grid), 0, -1):
        if fitting := grids_that_fit(num_ranks, needed):
            return tuple(sorted(fitting, key=lambda other: (_distance(grid, other), other))[:count])
    return ()


def _distance(grid: Grid, other: Grid) -> float:
    """By how much the axes grow and shrink; halving one counts as much as doubling it."""
    return round(sum(abs(log(a / b)) for a, b in zip(grid, other, strict=True)), 9)


def check_fit(grid: Grid, requirements: Iterable[Requirement]) -> None:
    """Accept a grid that meets all requirements.

    Raises:
        HanayoError: one isn't met; the message names layer, size, axes, and the nearest grids that fit.
    """
    needed = tuple(requirements)
    broken = [one for one in needed if not one.fits(grid)]
    if not broken:
        return
    others = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
    nearest = ", ".join(f"cube={near}" for near in nearest_grids(grid, needed))
    raise HanayoError(f"cube={grid}: {broken[0].broken_by(grid)}{others}. Nearest that fit: {nearest}.")


def ranked_grids(num_ranks: int, layer: TransformerLayer, keep: Keep = "gathered") -> tuple[Grid, ...]:
    """All grids that fit `layer`, the one that moves the least first; among equals, by storage, then by latency."""

    def cost(grid: Grid) -> tuple[float, float, int]:
        return round(layer.volume(grid, keep).total), round(layer.storage(grid, keep).total), layer.hops(grid, keep)

    return tuple(sorted(grids_that_fit(num_ranks, requirements_of(layer)), key=cost))


def best_grid(num_ranks: int, layer: TransformerLayer, keep: Keep = "gathered") -> Grid:
    """The first of them; (P, 1, 1), where only whole weights are moved, always fits.

    Example:
        >>> best_grid(8, TransformerLayer(tokens=16384, hidden=4096, heads=32))
        (4, 2, 1)
    """
    return ranked_grids(num_ranks, layer, keep)[0]
