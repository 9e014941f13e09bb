"""3-D: our own linear layers, on any grid; the residual stream is cut over batch, sequence and features."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.tensor3d.layers.linear import Linear3D
from lightning_hanayo.tensor3d.mesh import Mesh
from lightning_hanayo.tensor3d.parallel_style import SEQUENCE
from lightning_hanayo.tensor3d.sharding import Cut, Shard
from lightning_hanayo.tensor3d.stage_context import StageContext
from recipes.benchmarks.schemes.layer import Scheme

_LAYOUTS = SEQUENCE, SEQUENCE.swapped()


class ThreeD(Scheme):
    """Args:
    grid: its ranks.
    num_pieces: in which each product is played.
    """

    def __init__(self, grid: Mesh, num_pieces: int = 1) -> None:
        self._grid = grid
        self._setting = StageContext(grid, num_pieces=num_pieces)

    @override
    def linear(self, index: int, weight: Tensor) -> nn.Module:
        out, in_ = weight.shape
        with torch.device("meta"):  # values come from `weight`
            linear = Linear3D(in_, out, bias=False, setting=self._setting, layout=_LAYOUTS[index % 2])
        linear.register_parameter("weight", nn.Parameter(self.cut_weight(index, weight)))
        return linear

    @override
    def begin(self) -> None:
        self._setting.order.begin()

    @override
    def cut(self, x: Tensor) -> Tensor:
        return Shard((Cut(x.shape[0], "x"), Cut(x.shape[1], "y"), Cut(x.shape[2], "z"))).of(x, self._grid)

    @override
    def cut_weight(self, index: int, weight: Tensor) -> Tensor:
        layout = _LAYOUTS[index % 2]
        return Shard((Cut(weight.shape[0], layout.rows), Cut(weight.shape[1], layout.columns))).of(weight, self._grid)
