"""Dropout whose masks differ between ranks, though all ranks go on with equal random generators.

default generator      equal on all ranks: one number n is drawn, and the state goes on from there
rank's own stream      seeded by (n, rank): masks are drawn from it, inside the context only

No two ranks hold the same part of an activation, so each rank draws its own masks. Only the default generator is
advanced outside, so an activation checkpoint has nothing else to restore.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.seeds import default_generator, mix
from lightning_hanayo.tensor_parallel.stage_context import StageContext


@contextmanager
def rank_random_stream(context: StageContext, device: torch.device) -> Iterator[None]:
    """Inside, `device`'s default generator draws from this rank's own stream; afterwards all ranks are equal again.

    Example:
        >>> with rank_random_stream(context, x.device):
        ...     y = torch.nn.functional.dropout(x, 0.1)
    """
    if context.mesh.num_ranks == 1:
        yield
        return
    seed = mix(int(torch.randint(1 << 62, ())), context.mesh.index("xyz"))
    generator = default_generator(device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


class Dropout3D(nn.Dropout):
    """An `nn.Dropout` whose masks differ from rank to rank. All ranks of the mesh call it, in the same order.

    Example:
        >>> dropout = Dropout3D(0.1, context=context)
    """

    context: StageContext

    def __init__(self, p: float = 0.5, inplace: bool = False, *, context: StageContext) -> None:
        super().__init__(p, inplace)
        parallelize_dropout(self, context)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same. Draws nothing where nothing is dropped."""
        if not self.training or self.p == 0.0:
            return x
        y: Tensor = _drop(self, x)
        return y


@torch.compiler.disable
def _drop(module: Dropout3D, x: Tensor) -> Tensor:
    """Draws from this rank's own stream. A compiled graph has one stream for all."""
    with rank_random_stream(module.context, x.device):
        y: Tensor = nn.Dropout.forward(module, x)
    return y


def parallelize_dropout(module: nn.Module, context: StageContext) -> None:
    """Parallelize an `nn.Dropout` in place.

    Raises:
        UnsupportedError: it is another module, as `nn.Dropout1d`, which drops whole channels.
    """
    if not isinstance(module, nn.Dropout):
        raise UnsupportedError(f"{type(module).__name__} isn't nn.Dropout; leave it out of the cube")
    if not isinstance(module, Dropout3D):
        module.__class__ = Dropout3D
    module.context = context  # type: ignore[assignment]
