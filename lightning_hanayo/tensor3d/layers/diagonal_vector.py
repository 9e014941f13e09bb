"""The vectors on the diagonal: a bias or a gain of which each entry lies on one rank alone, as the paper stores them.

b [N], grid (1, 2, 2), features along y          stored            brought together

                                                 z=0  z=1          z=0  z=1
                                            y=0   b0    -     y=0   b0   b0
                                            y=1    -   b1     y=1   b1   b1

forward     broadcast along z from the diagonal, gathered along x
backward    summed and scattered along x, summed along z on the diagonal

Source: arXiv 2105.14450, its matrix-vector operations. The layers here store their vectors the simple way, N/y on
each rank, with one sum per batch; this costs two collectives per use, and needs y and z of one size.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.tensor3d.mesh import Mesh
from lightning_hanayo.tensor3d.sharding import Cut


@dataclass(frozen=True)
class Diagonal:
    """Where the entries of one vector lie.

    Example:
        >>> diagonal = Diagonal(grid, 1024)
        >>> bias = nn.Parameter(diagonal.of(whole))
        >>> y = y + diagonal_vector(bias, diagonal)

    Args:
        grid: of all ranks that call.
        size: of the whole vector.
        features: the axis its entries lie along, where it is used.

    Raises:
        HanayoError: the grid has no diagonal, or the vector doesn't divide.
    """

    grid: Mesh
    size: int
    features: Literal["y", "z"] = "y"

    def __post_init__(self) -> None:
        x, y, z = self.grid.sizes
        if y != z:
            raise HanayoError(
                f"a vector can be stored on the diagonal y == z where y and z are of one size; this grid is "
                f"{self.grid.sizes}. Store it along {self.features}, on all ranks: Cut({self.size}, {self.features!r})"
            )
        if self.size % (x * y):
            raise HanayoError(f"a vector of {self.size} entries doesn't divide by x * y = {x} * {y}")

    @property
    def across(self) -> str:
        """The axis it is broadcast along."""
        return "z" if self.features == "y" else "y"

    @property
    def is_on_it(self) -> bool:
        """Whether this rank stores a part."""
        return self.grid.place[1] == self.grid.place[2]

    @property
    def part_size(self) -> int:
        """Of each stored part."""
        return self.size // (self.grid.size("x") * self.grid.size(self.features))

    def of(self, whole: Tensor) -> Tensor:
        """[N] to this rank's part [N/(y x)], or to nothing, [0]."""
        start, stop = Cut(self.size, self.features + "x").span(self.grid)
        return whole[start : stop if self.is_on_it else start].clone()


def diagonal_vector(part: Tensor, diagonal: Diagonal) -> Tensor:
    """The stored part to [N/y], to add or to scale with. Called by all ranks of the grid."""
    whole: Tensor = _Diagonal.apply(part, diagonal)
    return whole


class _Diagonal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, diagonal: Diagonal) -> Tensor:
        ctx.diagonal = diagonal
        grid = diagonal.grid
        sent = part.clone() if diagonal.is_on_it else part.new_empty(diagonal.part_size)
        own = grid.axis(diagonal.across).broadcast(sent, grid.index(diagonal.features)).wait()
        return grid.axis("x").all_gather(own).wait().flatten()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        diagonal: Diagonal = ctx.diagonal
        grid = diagonal.grid
        own = grid.axis("x").reduce_scatter(gradient.contiguous().unflatten(0, (grid.size("x"), -1))).wait()
        total = grid.axis(diagonal.across).reduce(own.clone(), grid.index(diagonal.features)).wait()
        return total if diagonal.is_on_it else total[:0], None
