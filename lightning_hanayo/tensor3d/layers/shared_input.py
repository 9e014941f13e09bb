"""Gathers a module's input once for several linear layers that read it.

x [batch/x, seq/y, K/z]  --all-gather-->  [batch/x, seq, K/z]  -->  q, k, v
"""

from torch import Tensor

from lightning_hanayo.tensor3d.collectives import all_gather
from lightning_hanayo.tensor3d.parallel_style import AxisCollective
from lightning_hanayo.tensor3d.product import SharedSavedInput
from lightning_hanayo.tensor3d.stage_context import StageContext


class SharedInput:
    """The gathered input of one module's linear layers.

    Args:
        context: of the stage.
        collective: the all-gather, a style's `all_gather`.
    """

    def __init__(self, context: StageContext, collective: AxisCollective) -> None:
        self._context = context
        self._collective = collective
        self._last: tuple[Tensor, SharedSavedInput] | None = None

    def all_gather(self, x: Tensor) -> Tensor:
        """[.., n, ..] to the whole, without what pads its parts."""
        collective = self._context.bind(self._collective)
        gathered = all_gather(x, collective.axis, collective.dim, collective.size)
        self._last = None
        if self._context.keep == "shards" and gathered is not x:
            self._last = gathered, SharedSavedInput(x.detach(), collective)
        return gathered

    def saved(self, x: Tensor) -> SharedSavedInput | None:
        """Returns what the backward gathers `x` from again, if `x` is the tensor that was gathered last."""
        return self._last[1] if self._last is not None and self._last[0] is x else None

    def clear(self) -> None:
        """The module's forward has ended: keep nothing alive for it."""
        self._last = None
