"""A mesh axis whose transfers are logged. A dry one sends nothing, and logs what would be sent."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.overlap.link_queue import LinkQueue, Work
from lightning_hanayo.tensor_parallel.mesh import MeshAxis, Pending, Transfers
from recipes.benchmarks.schemes.log import Log


class _LoggedTransfers:
    """Transfers whose waits are logged."""

    def __init__(self, works: Work, log: Log, number: int) -> None:
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
        queue: of this host; None: transfers start at once.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, size: int, rank: int, log: Log, queue: LinkQueue | None = None
    ) -> None:
        super().__init__(group, size, rank, queue)
        self._log = log

    @override
    def _exchange(self, exchanges: Sequence[tuple[Sequence[Tensor] | Tensor, Tensor]]) -> Work:
        number = self._log.start(sum(into[0].numel() for _, into in exchanges) * (self.size - 1))
        works = Transfers([]) if self.group is None else super()._exchange(exchanges)
        return _LoggedTransfers(works, self._log, number)

    @override
    def all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        if self.size == 1:
            return super().all_reduce(tensor)
        number = self._log.start(2 * tensor.numel() * (self.size - 1) / self.size)
        group = self.group
        works = Transfers([]) if group is None else self._start(lambda: group.allreduce([tensor]))
        return Pending(_LoggedTransfers(works, self._log, number), lambda: tensor)

    def shift(self, own: Tensor, step: int) -> Pending[Tensor]:
        """Receive from the rank `step` further on, and send `own` to the one `step` back. Called by all ranks."""
        if step % self.size == 0:
            return Pending(None, lambda: own)
        received, group = torch.empty_like(own), self.group
        number = self._log.start(own.numel())

        def post() -> Work:
            assert group is not None
            works = [group.recv([received], (self.rank + step) % self.size, 0)]
            works.append(group.send([own], (self.rank - step) % self.size, 0))
            return Transfers(works)

        works = Transfers([]) if group is None else self._start(post)
        return Pending(_LoggedTransfers(works, self._log, number), lambda: received)


def wires(log: Log) -> type[MeshAxis]:
    """Returns the class that a mesh makes its axes of."""
    return cast(type[MeshAxis], partial(Wire, log=log))
