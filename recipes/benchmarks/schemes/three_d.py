"""3-D: this package's linear layers on any mesh; the residual stream is sharded over batch, sequence and features."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.overlap.turns import DeviceTurns
from lightning_hanayo.tensor_parallel.layers.linear import Linear3D
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import SEQUENCE
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from lightning_hanayo.weight_gradients import WeightGradients
from recipes.benchmarks.schemes.layer import Scheme

_STYLES = SEQUENCE, SEQUENCE.row_parallel()


class ThreeD(Scheme):
    """The layers of `lightning_hanayo.tensor_parallel`.

    Args:
        mesh: the ranks.
        num_pieces: in how many pieces each product runs.
        queue: takes the weights' gradients while a backward is split; None: it never is.
        turns: which of two micro-batches runs now; None: there is one at a time.
        keep_weights: whether weights are gathered once a batch.
    """

    def __init__(
        self,
        mesh: Mesh,
        num_pieces: int = 1,
        queue: WeightGradients | None = None,
        turns: DeviceTurns | None = None,
        keep_weights: bool = False,
    ) -> None:
        self._mesh = mesh
        self.context = StageContext(mesh, num_pieces=num_pieces, queue=queue, turns=turns, keep_weights=keep_weights)

    @property
    @override
    def hooks(self) -> StageContext:
        return self.context

    @override
    def linear(self, index: int, weight: Tensor) -> nn.Module:
        out, in_ = weight.shape
        with torch.device("meta"):  # values come from `weight`
            linear = Linear3D(in_, out, bias=False, context=self.context, style=_STYLES[index % 2])
        linear.register_parameter("weight", nn.Parameter(self.cut_weight(index, weight)))
        return linear

    @override
    def begin(self) -> None:
        self.context.prefetch_order.begin()

    @override
    def cut(self, x: Tensor) -> Tensor:
        return Shard((DimShard(x.shape[0], "x"), DimShard(x.shape[1], "y"), DimShard(x.shape[2], "z"))).of(
            x, self._mesh
        )

    @override
    def cut_weight(self, index: int, weight: Tensor) -> Tensor:
        style = _STYLES[index % 2]
        return Shard((DimShard(weight.shape[0], style.out_axes), DimShard(weight.shape[1], style.in_axes))).of(
            weight, self._mesh
        )
