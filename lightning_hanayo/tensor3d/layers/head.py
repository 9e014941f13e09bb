"""A 3-D parallel language-model head, whose logits stay sharded over the vocabulary for `cross_entropy3d`.

x [batch/x, seq/y, H/z]  -->  logits [batch/x, seq, V/(y z)]

If the vocabulary doesn't divide, the last parts hold fewer logits, followed by zeros.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_hanayo.tensor3d.layers.linear import Linear3D, LinearSharding
from lightning_hanayo.tensor3d.parallel_style import SEQUENCE, ParallelStyle
from lightning_hanayo.tensor3d.sharding import DimShard
from lightning_hanayo.tensor3d.stage_context import StageContext


class Head3D(Linear3D):
    """A `Linear3D` to a vocabulary of any size. Its weight may be an `Embedding3D`'s parameter.

    Example:
        >>> head = Head3D(768, 50257, bias=False, context=context)
        >>> loss = cross_entropy3d(head(x), labels, head.vocabulary, context.mesh)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        context: StageContext,
        style: ParallelStyle = SEQUENCE,
        **factory: Any,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, **factory)
        parallelize_head(self, context, style)

    @property
    def vocabulary(self) -> DimShard:
        """How the logits are sharded."""
        return self.sharding.vector.dims[0]

    def forward(self, x: Tensor) -> Tensor:
        """Called by all ranks of the mesh, in the same order."""
        logits, bias = self.sharding.forward(x, None), self._parameters["bias"]
        if bias is None:
            return logits
        return logits + pad(bias, (0, logits.shape[-1] - bias.shape[0])).to(logits.dtype)


def parallelize_head(module: nn.Linear, context: StageContext, style: ParallelStyle = SEQUENCE) -> None:
    """Parallelize an `nn.Linear` in place. Its weight may be sharded already, as an embedding's."""
    module.__class__ = Head3D
    LinearSharding(context, style, (module.out_features, module.in_features)).attach(module)
