"""The dropout over the grid: every rank drops entries of its own, and all go on with equal generators.

default generator     n, equal on all ranks      ->  drawn once, and the state goes on from there
own stream            seeded by (n, rank)        ->  masks, inside the context alone

No two ranks hold the same part of an activation, so each one's place in the grid is a stream. What is drawn from the
default generator is all that an activation checkpoint has to restore.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.seeds import default_generator, mix
from lightning_hanayo.tensor3d.stage_context import StageContext


@contextmanager
def own_stream(setting: StageContext, device: torch.device) -> Iterator[None]:
    """Inside, the default generator of `device` is on a stream of this rank's own; afterwards equal on all ranks again.

    Example:
        >>> with own_stream(setting, x.device):
        ...     y = torch.nn.functional.dropout(x, 0.1)
    """
    if setting.grid.num_ranks == 1:
        yield
        return
    seed = mix(int(torch.randint(1 << 62, ())), setting.grid.index("xyz"))
    generator = default_generator(device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


class Dropout3D(nn.Dropout):
    """An `nn.Dropout` whose masks differ from rank to rank. All ranks of the grid call it, in the same order.

    Example:
        >>> dropout = Dropout3D(0.1, setting=setting)
    """

    setting: StageContext

    def __init__(self, p: float = 0.5, inplace: bool = False, *, setting: StageContext) -> None:
        super().__init__(p, inplace)
        spread_dropout(self, setting)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape; nothing is drawn where nothing is dropped."""
        if not self.training or self.p == 0.0:
            return x
        with own_stream(self.setting, x.device):
            return super().forward(x)


def spread_dropout(module: nn.Module, setting: StageContext) -> None:
    """Spread an `nn.Dropout` over the grid, in place.

    Raises:
        UnsupportedError: it is another module, as `nn.Dropout1d`, which drops whole channels.
    """
    if not isinstance(module, nn.Dropout):
        raise UnsupportedError(f"{type(module).__name__} isn't nn.Dropout; leave it out of the cube")
    if not isinstance(module, Dropout3D):
        module.__class__ = Dropout3D
    module.setting = setting  # type: ignore[assignment]
