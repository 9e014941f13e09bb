"""The embedding over the grid, in place of `nn.Embedding`.

ids [batch/x, seq]  -->  [batch/x, seq, H/z], zero where another rank of y has the row  --summed, scattered along y-->
                         [batch/x, seq/y, H/z]

The table [V, H] is stored as [V/(y x), H/z], and brought together along x: exactly as the weight of a head, which may
be the same parameter.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.tensor3d.collectives import scatter
from lightning_hanayo.tensor3d.divisibility import Divisibility, check
from lightning_hanayo.tensor3d.layers.guarded_weight import guarded_weight
from lightning_hanayo.tensor3d.layers.weight import Weight, with_own_weight
from lightning_hanayo.tensor3d.parallel_style import SEQUENCE, ParallelStyle
from lightning_hanayo.tensor3d.sharding import Cut, Shard
from lightning_hanayo.tensor3d.stage_context import StageContext


class _Part:
    """One embedding's part in the grid: rows `first` and on, `num_rows` of them with their padding."""

    def __init__(self, module: nn.Embedding, setting: StageContext, layout: ParallelStyle) -> None:
        self.setting = setting
        self.layout = layout
        grid = setting.grid
        self.num_rows = -(-module.num_embeddings // grid.size(layout.gather.axis))
        self.first = self.num_rows * grid.index(layout.gather.axis)
        self.shard = Shard((Cut(module.num_embeddings, layout.rows), Cut(module.embedding_dim, layout.columns)))
        shape = self.num_rows, module.embedding_dim // grid.size(layout.columns)
        self.weight = Weight(module, grid.axis("x"), shape, transposed=False, late=setting.late, queue=setting.queue)

    def __deepcopy__(self, memo: Any) -> "_Part":
        return with_own_weight(self, memo)

    def rows_of(self, ids: Tensor, but: int | None = None) -> Tensor:
        """Where this rank's table has them; `num_rows` for those that it hasn't, and for the id `but`."""
        rows = ids - self.first
        elsewhere = (rows < 0) | (rows >= self.num_rows)
        if but is not None:
            elsewhere |= ids == but
        return rows.masked_fill(elsewhere, self.num_rows)


class Embedding3D(nn.Embedding):
    """A lookup in a table of which each rank stores 1/(x y z). Arguments as `nn.Embedding`'s.

    Example:
        >>> embedding = Embedding3D(50257, 768, setting=setting)
        >>> embedding(ids).shape  # [batch/x, seq/y, 768/z]

    Args:
        *args: as there. All numbers are the whole table's, and so are the ids.
        setting: what the layers of a stage share.
        layout: of the linear layer that its output leads to.
        **kwargs: as there.
    """

    part: _Part
    weight = property(guarded_weight)

    def __init__(self, *args: Any, setting: StageContext, layout: ParallelStyle = SEQUENCE, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spread_embedding(self, setting, layout)

    @property
    def shards(self) -> dict[str, Shard]:
        """How the table is cut. Its gradient is no partial sum."""
        return {"weight": self.part.shard}

    def reset_parameters(self) -> None:
        """While the layer is made, before it is cut."""
        weight = self._parameters["weight"]
        assert weight is not None
        nn.init.normal_(weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                weight[self.padding_idx].fill_(0)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch/x, seq] to [batch/x, seq/y, H/z]. Called by all ranks; ids are the same along y and z."""
        whole = _Lookup.apply(self._parameters["weight"], ids, self)
        side = self.part.layout.gather
        return scatter(whole, self.part.setting.grid.axis(side.axis), side.dim)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, module: Embedding3D) -> Tensor:
        part = module.part
        arriving = part.weight.start(table.dtype)
        torch._assert_async(((ids >= 0) & (ids < module.num_embeddings)).all(), "an id is outside of the table")
        rows = part.rows_of(ids)
        found = nn.functional.embedding(rows.clamp_max(part.num_rows - 1), arriving.wait())
        ctx.module = module
        ctx.save_for_backward(ids)
        return found.masked_fill_((rows == part.num_rows).unsqueeze(-1), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        part, last = ctx.module.part, ctx.module.part.num_rows
        rows = part.rows_of(ctx.saved_tensors[0], but=ctx.module.padding_idx)
        whole = torch.ops.aten.embedding_dense_backward(gradient.contiguous(), rows, last + 1, last, False)
        return part.weight.start_sum(whole[:last]).wait(), None, None


def spread_embedding(module: nn.Embedding, setting: StageContext, layout: ParallelStyle = SEQUENCE) -> None:
    """Spread an `nn.Embedding` over the grid, in place: the parameter object, names and attributes stay.

    Raises:
        UnsupportedError: it has an option whose meaning needs the whole table, or the whole batch.
        HanayoError: its features don't divide.
    """
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option):
            raise UnsupportedError(f"an embedding over the cube can't have {option}={getattr(module, option)!r}")
    check([Divisibility(type(module).__name__, "features", module.embedding_dim, layout.columns)], setting.grid.sizes)
    if not isinstance(module, Embedding3D):
        module.__class__ = Embedding3D
    part, parameter = _Part(module, setting, layout), module._parameters["weight"]
    assert parameter is not None
    module.part = part  # type: ignore[assignment]
    parameter.data = part.shard.of(parameter.data, setting.grid)
