"""3-D parallel feed-forward networks: one linear layer up, or two that share their input, an activation, one down.

x [batch/x, seq/y, h/z]  --up-->  [batch/x, seq, n/(y z)]  --activation, dropout-->  --down-->  [batch/x, seq/y, h/z]

Between the linear layers each entry is computed from itself alone, so nothing is sent.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import silu

from lightning_hanayo.linear_modules import as_autocast
from lightning_hanayo.tensor_parallel.layers.dropout import Dropout3D
from lightning_hanayo.tensor_parallel.layers.linear import Linear3D, SharedInput
from lightning_hanayo.tensor_parallel.product import SEQUENCE, ParallelStyle
from lightning_hanayo.tensor_parallel.stage_context import StageContext


class FeedForward3D(nn.Module):
    """down(dropout(activation(up(x)))).

    Example:
        >>> FeedForward3D(768, 3072, dropout=0.1, context=context)

    Args:
        features: of the residual stream.
        inner_features: between up and down.
        activation: a function that computes each entry from itself alone.
        dropout: the probability.
        bias: whether both linear layers have one.
        context: of the stage.
        style: of `up`; `down` is its row-parallel counterpart.
        **factory: device and dtype.
    """

    def __init__(
        self,
        features: int,
        inner_features: int,
        activation: Callable[[Tensor], Tensor] = nn.functional.gelu,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        context: StageContext,
        style: ParallelStyle = SEQUENCE,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.up = Linear3D(features, inner_features, bias, context=context, style=style, **factory)
        self.activation = activation
        self.dropout = Dropout3D(dropout, context=context)
        self.down = Linear3D(inner_features, features, bias, context=context, style=style.row_parallel(), **factory)

    def forward(self, x: Tensor) -> Tensor:
        """[batch/x, seq/y, h/z] to the same. Called by all ranks of the mesh, in the same order."""
        y: Tensor = self.down(self.dropout(self.activation(self.up(x))))
        return y


class SwiGLU3D(nn.Module):
    """down(silu(gate(x)) * up(x)), where gate and up are one product. Source: Shazeer, arXiv 2002.05202.

    Example:
        >>> SwiGLU3D(4096, 11008, context=context)

    Args:
        features: of the residual stream.
        inner_features: of gate and up, each.
        bias: whether all three linear layers have one.
        context: of the stage.
        style: of `gate` and `up`; `down` is its row-parallel counterpart.
        **factory: device and dtype.
    """

    def __init__(
        self,
        features: int,
        inner_features: int,
        *,
        bias: bool = False,
        context: StageContext,
        style: ParallelStyle = SEQUENCE,
        **factory: Any,
    ) -> None:
        super().__init__()
        self._shared_input = SharedInput(context, style)
        shared: dict[str, Any] = {"context": context, "style": style, "shared_input": self._shared_input, **factory}
        self.gate = Linear3D(features, inner_features, bias, **shared)
        self.up = Linear3D(features, inner_features, bias, **shared)
        self.down = Linear3D(inner_features, features, bias, context=context, style=style.row_parallel(), **factory)

    def forward(self, x: Tensor) -> Tensor:
        """[batch/x, seq/y, h/z] to the same. Called by all ranks of the mesh, in the same order."""
        gathered = self._shared_input.all_gather(as_autocast(x))
        inner = silu(self.gate(gathered)) * self.up(gathered)
        self._shared_input.clear()
        y: Tensor = self.down(inner)
        return y
