"""The rows: a linear layer in a block of unknown kind, which gets and gives this rank's own rows with whole features.

own rows [m, K]  --all-to-all over z-->  [z, m, K/z]  --product-->  [y, m, N/y]  --all-to-all over y-->  own rows [m, N]

The product gathers over y on dim 1 and scatters over z on dim 0, so that rows come back to whom they belong to; with
both on one dimension they'd come back with y and z exchanged. Ranks may have different numbers of rows: all pad theirs
to the largest. Where tokens are few beside features, only the weight travels, and rows stay where they are:

own rows [m, K]  --product with the whole W, of which each rank keeps [N/(x y z), K]-->  own rows [m, N]
"""

from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.linear_modules import as_autocast
from lightning_hanayo.tensor3d.collectives import exchange, padded, parts_of
from lightning_hanayo.tensor3d.layers.linear import Spread, attach, features
from lightning_hanayo.tensor3d.layers.product import Call, product
from lightning_hanayo.tensor3d.parallel_style import ROWS
from lightning_hanayo.tensor3d.sharding import Cut, Shard
from lightning_hanayo.tensor3d.stage_context import StageContext

Travel = Literal["rows", "weight"]
"""what is sent between ranks: rows, and parts of the weight; or the weight alone"""


class _Rows(Spread):
    """A layer whose rows travel."""

    @override
    def call(self, x: Tensor, bias: Tensor | None) -> Tensor:
        own = as_autocast(x).flatten(0, -2)
        (y_axis, z_axis), out = (self.setting.grid.axis(name) for name in "yz"), self.matrix.shape[0]
        most = self._most(own)
        columns = exchange(parts_of(padded(own, 0, most), z_axis.size, 1), z_axis)
        y = super().call(columns, None if bias is None else padded(bias, 0, self.shape[0]))
        rows = exchange(y[0].unflatten(0, (y_axis.size, most)), y_axis).movedim(0, 1).flatten(1)
        return rows[: own.shape[0], :out].reshape(*x.shape[:-1], out)

    def _most(self, own: Tensor) -> int:
        """Rows that a rank has. They may differ for reasons that only the code around knows, so all agree each time."""
        plane, count = self.setting.grid.axis("yz"), torch.tensor([own.shape[0]], device=own.device)
        return int(plane.all_reduce_max(count).wait())


class _Whole(Spread):
    """A layer whose weight travels: cut over all ranks along its out-features, and brought together for each call."""

    axis = "xyz"

    def __init__(self, setting: StageContext, sizes: tuple[int, int]) -> None:
        super().__init__(setting, ROWS, sizes, None, None)
        out, in_ = self.shape = sizes
        self.matrix = Shard((Cut(out, "xyz", as_one=True), Cut(in_)))
        self.vector = Shard((Cut(out),), "xyz")

    @override
    def call(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self.weight is not None
        following = self.setting.order.after(self.weight)
        y = product(x, Call(self.weight, None, None, self.setting.keep, following=following))
        return y if bias is None else y + bias.to(y.dtype)


def spread_rows(module: nn.Module, setting: StageContext, travel: Travel = "rows") -> None:
    """Spread an `nn.Linear` or a `Conv1D` over the grid, in place, for code that knows nothing of it.

    All ranks of the grid call it in the same order, each with rows of its own, or with none.
    """
    sizes = features(module)
    attach(module, _Rows(setting, ROWS, sizes, None, None) if travel == "rows" else _Whole(setting, sizes))


def cheapest(sizes: tuple[int, int], tokens: int, grid: tuple[int, int, int]) -> Travel:
    """What had better travel, by what each rank receives in a forward and a backward.

    M rows [M, K] times W [N, K], P = x y z ranks:
    rows      2 [(y-1) M K + (x-1) K N + (z-1) M N + (1 - 1/z) M K + (1 - 1/y) M N] / P
    weight    2 (P-1) K N / P
    """
    (n, k), (x, y, z) = sizes, grid
    rows = (y - 1 / z) * tokens * k + (x - 1) * k * n + (z - 1 / y) * tokens * n
    return "weight" if (x * y * z - 1) * k * n <= rows else "rows"
