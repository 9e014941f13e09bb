"""What a 3-D product needs besides its input: the weight, the collectives of input and outputs, what is saved."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_hanayo.tensor3d.collectives import start_all_gather, start_all_gather_each, start_reduce_scatter_each
from lightning_hanayo.tensor3d.mesh import MeshAxis, Pending
from lightning_hanayo.tensor3d.sharded_weight import ShardedWeight

Keep = Literal["gathered", "shards"]
"""what a product saves for its backward"""


@dataclass(frozen=True)
class BoundCollective:
    """A collective of an input's or output's dimension `dim`, whose true length is `size` if its parts are padded."""

    axis: MeshAxis
    dim: int
    size: int | None = None


@dataclass(frozen=True)
class ProductArgs:
    """What one product needs besides its input.

    Args:
        weight: W, of one layer or of several.
        all_gather: of the input; None: it is gathered already.
        reduce_scatter: of the outputs; None: they are no partial sums.
        keep: what is saved for the backward.
        num_pieces: in how many pieces the product runs; in fewer if there are fewer rows.
        has_empty_pieces: whether it runs in so many pieces even then, as all ranks of the mesh must.
    """

    weight: ShardedWeight
    all_gather: BoundCollective | None
    reduce_scatter: BoundCollective | None
    keep: Keep = "gathered"
    num_pieces: int = 1
    has_empty_pieces: bool = False

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Cut `x` along a dimension before the last one that no collective touches; whole if there is none."""
        if self.num_pieces == 1:
            return (x,)
        touched = self._touched_dims(x)
        free = [dim for dim in range(x.dim() - 1) if dim not in touched]
        if not free:
            return (x,)
        count = self.num_pieces if self.has_empty_pieces else max(1, min(self.num_pieces, x.shape[free[0]]))
        return x.tensor_split(count, free[0])

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join what `split` has cut: the pieces of an input, an output or a gradient."""
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(list(pieces), min(set(range(pieces[0].dim() - 1)) - self._touched_dims(pieces[0])))

    def join_each(self, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The pieces of several tensors, joined."""
        return list(pieces[0]) if len(pieces) == 1 else [self.join(one) for one in zip(*pieces, strict=True)]

    def _touched_dims(self, x: Tensor) -> set[int]:
        return {one.dim % x.dim() for one in (self.all_gather, self.reduce_scatter) if one is not None}


def gather(collective: BoundCollective | None, x: Tensor) -> Pending[Tensor]:
    """Start to gather the parts of `x`, if there is a collective for it."""
    if collective is None:
        return Pending.done(x)
    return start_all_gather(x, collective.axis, collective.dim, collective.size)


def gather_each(
    collective: BoundCollective | None, tensors: Sequence[Tensor], sizes: Sequence[int | None]
) -> Pending[list[Tensor]]:
    """Start to gather the parts of several tensors, to these sizes."""
    if collective is None:
        return Pending.done(list(tensors))
    return start_all_gather_each(tensors, collective.axis, collective.dim, sizes)


def scatter_each(collective: BoundCollective | None, tensors: Sequence[Tensor]) -> Pending[list[Tensor]]:
    """Start to sum several tensors; each rank gets its part."""
    if collective is None:
        return Pending.done(list(tensors))
    return start_reduce_scatter_each(tensors, collective.axis, collective.dim)
