"""The head over the grid: a linear layer whose output stays cut over the vocabulary, for `cross_entropy3d`.

x [batch/x, seq/y, H/z]  -->  logits [batch/x, seq, V/(y z)]    the last parts may hold fewer real columns: zeros follow
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_hanayo.tensor3d.layers.linear import Linear3D, Spread, attach
from lightning_hanayo.tensor3d.parallel_style import SEQUENCE, ParallelStyle
from lightning_hanayo.tensor3d.sharding import Cut
from lightning_hanayo.tensor3d.stage_context import StageContext


class Head3D(Linear3D):
    """A `Linear3D` to a vocabulary of any size. Its weight may be an `Embedding3D`'s parameter.

    Example:
        >>> head = Head3D(768, 50257, bias=False, setting=setting)
        >>> loss = cross_entropy3d(head(x), labels, head.vocabulary, setting.grid)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        setting: StageContext,
        layout: ParallelStyle = SEQUENCE,
        **factory: Any,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, **factory)
        spread_head(self, setting, layout)

    @property
    def vocabulary(self) -> Cut:
        """How the logits are cut."""
        return self.spread.vector.cuts[0]

    def forward(self, x: Tensor) -> Tensor:
        """Called by all ranks of the grid, in the same order."""
        logits, bias = self.spread.call(x, None), self._parameters["bias"]
        if bias is None:
            return logits
        return logits + pad(bias, (0, logits.shape[-1] - bias.shape[0])).to(logits.dtype)


def spread_head(module: nn.Linear, setting: StageContext, layout: ParallelStyle = SEQUENCE) -> None:
    """Spread an `nn.Linear` over the grid, in place. Its weight may be spread already, as an embedding's."""
    module.__class__ = Head3D
    attach(module, Spread(setting, layout, (module.out_features, module.in_features), None, None))
