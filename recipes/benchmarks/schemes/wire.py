"""The wire: an axis whose transfers are logged; a dry one moves nothing, and logs what would be moved."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.tensor3d.mesh import MeshAxis, Pending, Transfers, Waitable
from recipes.benchmarks.schemes.log import Log


class _Noted:
    """Transfers, and the log's note that they are waited for."""

    def __init__(self, works: Waitable, log: Log, number: int) -> None:
        self._works, self._log, self._number = works, log, number

    def wait(self) -> None:
        self._log.wait(self._number)
        self._works.wait()


class Wire(MeshAxis):
    """An axis.

    Args:
        group: these ranks. None where `size` is above 1: a dry one.
        size: how many they are.
        place: this rank's among them.
        log: of this host.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int, place: int, log: Log) -> None:
        super().__init__(group, size, place)
        self._log = log

    @override
    def _exchange(self, out: Sequence[Tensor] | Tensor, into: Tensor) -> Waitable:
        number = self._log.start(into[0].numel() * (self.size - 1))
        return _Noted(Transfers([]) if self.group is None else super()._exchange(out, into), self._log, number)

    @override
    def all_reduce(self, tensor: Tensor) -> Pending:
        if self.size == 1:
            return super().all_reduce(tensor)
        number = self._log.start(2 * tensor.numel() * (self.size - 1) / self.size)
        works = [] if self.group is None else [self.group.allreduce([tensor])]
        return Pending(_Noted(Transfers(works), self._log, number), lambda: tensor)

    def shift(self, own: Tensor, step: int) -> Pending:
        """What the rank `step` places on has; the one `step` places back gets `own`. All do so at a time."""
        if step % self.size == 0:
            return Pending(None, lambda: own)
        arriving, works = torch.empty_like(own), []
        if self.group is not None:
            works = [self.group.recv([arriving], (self.place + step) % self.size, 0)]
            works.append(self.group.send([own], (self.place - step) % self.size, 0))
        return Pending(_Noted(Transfers(works), self._log, self._log.start(own.numel())), lambda: arriving)


def wires(log: Log) -> type[MeshAxis]:
    """What makes them, for a grid."""
    return cast(type[MeshAxis], partial(Wire, log=log))
