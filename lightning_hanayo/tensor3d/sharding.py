"""The shard: which entries of a whole tensor lie at a place of the grid.

W [8, 4] of a first linear layer, grid (2, 2, 1), cut over ("yx", "z"):      rows 0..3 at y=0, of these 0..1 at x=0

fused q, k, v with 2 heads over y: order = q0 k0 v0 q1 k1 v1, so that rank y finds its heads' rows side by side
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_hanayo.tensor3d.mesh import Mesh


@dataclass(frozen=True)
class Cut:
    """How one dimension is cut: along `axes` in this order, each part again along the next one.

    Args:
        size: of the whole dimension.
        axes: "" for a dimension that isn't cut.
        order: the entries in the order in which they are cut; None: as they are.
        as_one: whether the axes are one: sizes that don't divide are rounded up once, not along each.
    """

    size: int
    axes: str = ""
    order: tuple[int, ...] | None = None
    as_one: bool = False

    @cached_property
    def entries(self) -> Tensor:
        """All entries in their order, [size]."""
        return torch.arange(self.size) if self.order is None else torch.tensor(self.order)

    def span(self, grid: Mesh, place: Sequence[int] | None = None) -> tuple[int, int]:
        """Start and stop in the order. Parts that don't divide are rounded up, so that the last ones may be smaller."""
        start, stop, part = 0, self.size, self.size
        for name in (self.axes,) if self.as_one else self.axes:
            part = -(-part // grid.size(name))
            start = min(stop, start + part * grid.index(name, place))
            stop = min(stop, start + part)
        return start, stop

    def at(self, grid: Mesh, place: Sequence[int] | None = None) -> Tensor:
        """The entries at a place, [local size]."""
        start, stop = self.span(grid, place)
        return self.entries[start:stop]


@dataclass(frozen=True)
class Shard:
    """How a parameter is cut, one `Cut` per dimension, and along which axes its gradient is still a partial sum.

    Ranks that differ only along other axes than those it is cut over hold the same values.
    """

    cuts: tuple[Cut, ...]
    partial: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        return tuple(cut.size for cut in self.cuts)

    @property
    def axes(self) -> str:
        """All axes it is cut over."""
        return "".join(cut.axes for cut in self.cuts)

    def replicas(self, grid: Mesh) -> int:
        """How many ranks hold the same part."""
        return grid.num_ranks // grid.size(self.axes)

    def local_shape(self, grid: Mesh, place: Sequence[int] | None = None) -> tuple[int, ...]:
        """The part's at a place; this rank's if None."""
        return tuple(stop - start for start, stop in (cut.span(grid, place) for cut in self.cuts))

    def of(self, whole: Tensor, grid: Mesh, place: Sequence[int] | None = None) -> Tensor:
        """The part of `whole` at a place (this rank's if None), in memory of its own.

        A tensor of another shape is cut along the dimensions that it shares; a scalar is whole everywhere.
        """
        part = whole
        for dim, cut in enumerate(self.cuts[: whole.dim()]):
            if cut.axes and whole.shape[dim] == cut.size:
                part = part.index_select(dim, cut.at(grid, place).to(whole.device))
        return part.clone() if part is whole else part.contiguous()

    def put(self, whole: Tensor, part: Tensor, grid: Mesh, place: Sequence[int]) -> None:
        """Write the `part` that lies at `place` into `whole`."""
        where = [cut.at(grid, place) for cut in self.cuts]
        if where:
            whole[torch.meshgrid(*where, indexing="ij")] = part
        else:
            whole.copy_(part)
