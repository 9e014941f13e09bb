"""A mesh axis whose transfers are logged. A dry one sends nothing, and logs what would be sent."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.tensor3d.mesh import MeshAxis, Pending, Transfers, Waitable
from recipes.benchmarks.schemes.log import Log


class _LoggedTransfers:
    """Transfers whose waits are logged."""

    def __init__(self, works: Waitable, log: Log, number: int) -> None:
        self._works, self._log, self._number = works, log, number

    def wait(self) -> None:
        self._log.wait(self._number)
        self._works.wait()


class Wire(MeshAxis):
    """An axis whose transfers are logged.

    Args:
        group: the process group; None with a `size` above 1 for a dry one.
        size: the number of ranks.
        rank: this rank's number among them.
        log: of this host.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int, rank: int, log: Log) -> None:
        super().__init__(group, size, rank)
        self._log = log

    @override
    def _send_and_receive(self, out: Sequence[Tensor] | Tensor, into: Tensor) -> Waitable:
        number = self._log.start(into[0].numel() * (self.size - 1))
        return _LoggedTransfers(
            Transfers([]) if self.group is None else super()._send_and_receive(out, into), self._log, number
        )

    @override
    def all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        if self.size == 1:
            return super().all_reduce(tensor)
        number = self._log.start(2 * tensor.numel() * (self.size - 1) / self.size)
        works = [] if self.group is None else [self.group.allreduce([tensor])]
        return Pending(_LoggedTransfers(Transfers(works), self._log, number), lambda: tensor)

    def shift(self, own: Tensor, step: int) -> Pending[Tensor]:
        """Receive from the rank `step` further on, and send `own` to the one `step` back. Called by all ranks."""
        if step % self.size == 0:
            return Pending(None, lambda: own)
        received, works = torch.empty_like(own), []
        if self.group is not None:
            works = [self.group.recv([received], (self.rank + step) % self.size, 0)]
            works.append(self.group.send([own], (self.rank - step) % self.size, 0))
        return Pending(_LoggedTransfers(Transfers(works), self._log, self._log.start(own.numel())), lambda: received)


def wires(log: Log) -> type[MeshAxis]:
    """Returns the class that a mesh makes its axes of."""
    return cast(type[MeshAxis], partial(Wire, log=log))
