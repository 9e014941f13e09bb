"""The feed-forward layers over the grid: one linear layer up, or two side by side, something in between, one down.

x [batch/x, seq/y, h/z]  --up-->  [batch/x, seq, n/(y z)]  --activation, dropout-->  --down-->  [batch/x, seq/y, h/z]

Between the two each entry is on its own, so that nothing is sent.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import silu

from lightning_hanayo.linear_modules import as_autocast
from lightning_hanayo.tensor3d.boundary.shared_input import SharedInput
from lightning_hanayo.tensor3d.layers.dropout import Dropout3D
from lightning_hanayo.tensor3d.layers.linear import Linear3D
from lightning_hanayo.tensor3d.parallel_style import SEQUENCE, ParallelStyle
from lightning_hanayo.tensor3d.stage_context import StageContext


class FeedForward3D(nn.Module):
    """down(dropout(activation(up(x)))).

    Example:
        >>> FeedForward3D(768, 3072, dropout=0.1, setting=setting)

    Args:
        features: of the residual stream.
        inner_features: between up and down.
        activation: of each entry by itself.
        dropout: the probability.
        bias: whether both have one.
        setting: what the layers of a stage share.
        layout: of `up`; `down` has it swapped.
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
        setting: StageContext,
        layout: ParallelStyle = SEQUENCE,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.up = Linear3D(features, inner_features, bias, setting=setting, layout=layout, **factory)
        self.activation = activation
        self.dropout = Dropout3D(dropout, setting=setting)
        self.down = Linear3D(inner_features, features, bias, setting=setting, layout=layout.swapped(), **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Called by all ranks of the grid, in the same order."""
        y: Tensor = self.down(self.dropout(self.activation(self.up(x))))
        return y


class SwiGLU3D(nn.Module):
    """down(silu(gate(x)) * up(x)), x brought together once. Source: Shazeer, arXiv 2002.05202.

    Example:
        >>> SwiGLU3D(4096, 11008, setting=setting)

    Args:
        features: of the residual stream.
        inner_features: of gate and up, each.
        bias: whether all three have one.
        setting: what the layers of a stage share.
        layout: of `gate` and `up`; `down` has it swapped.
        **factory: device and dtype.
    """

    def __init__(
        self,
        features: int,
        inner_features: int,
        *,
        bias: bool = False,
        setting: StageContext,
        layout: ParallelStyle = SEQUENCE,
        **factory: Any,
    ) -> None:
        super().__init__()
        self._entry = SharedInput(setting, layout.gather)
        inner: dict[str, Any] = {"setting": setting, "layout": layout, "entry": self._entry, **factory}
        self.gate = Linear3D(features, inner_features, bias, **inner)
        self.up = Linear3D(features, inner_features, bias, **inner)
        self.down = Linear3D(inner_features, features, bias, setting=setting, layout=layout.swapped(), **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Called by all ranks of the grid, in the same order."""
        whole = self._entry.enter(as_autocast(x))
        inner = silu(self.gate(whole)) * self.up(whole)
        self._entry.leave()
        y: Tensor = self.down(inner)
        return y
