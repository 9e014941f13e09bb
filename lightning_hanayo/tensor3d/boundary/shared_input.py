"""The entry: where a module's input is brought together once, for several linear layers inside.

x [batch, seq/y, K/z]  --gather-->  [batch, seq, K/z]  -->  q, k, v  (or gate and up)
"""

from torch import Tensor

from lightning_hanayo.tensor3d.collectives import gather
from lightning_hanayo.tensor3d.layers.product import Source
from lightning_hanayo.tensor3d.parallel_style import AxisCollective
from lightning_hanayo.tensor3d.stage_context import StageContext


class SharedInput:
    """One module's.

    Args:
        setting: the stage's.
        side: what is gathered: a layout's `gather`.
    """

    def __init__(self, setting: StageContext, side: AxisCollective) -> None:
        self._setting = setting
        self._side = side
        self._last: tuple[Tensor, Source] | None = None

    def enter(self, x: Tensor) -> Tensor:
        """[.., n, ..] to the whole, or to the length of the sequences under way."""
        along = self._setting.along(self._side)
        whole = gather(x, along.axis, along.dim, along.size)
        self._last = None
        if self._setting.keep == "shards" and whole is not x:
            self._last = whole, Source(x.detach(), along)
        return whole

    def source_of(self, x: Tensor) -> Source | None:
        """Where `x` can be had from again, if it is what has just entered."""
        return self._last[1] if self._last is not None and self._last[0] is x else None

    def leave(self) -> None:
        """The module has ended: nothing is kept alive for it."""
        self._last = None
