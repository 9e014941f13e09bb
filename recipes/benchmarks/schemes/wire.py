"""The wire: an axis whose transfers are logged, and use a slow link both ways at once.

gloo's own all-gather and all-to-all post a send before the receive. A receive is announced to the sender in the same
stream, so between two hosts that don't start at the same moment the announcement waits behind the data, and one
direction after the other is used:

    send first       a -> b ==========| a announces              receive first     a -> b ==========
                     b -> a           |========== b                                b -> a ==========
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.tensor3d.grid import Axis, Pending
from recipes.benchmarks.schemes.log import Log

_TAG = 0


class _All:
    """Several transfers, and the log's note that they are waited for; once."""

    def __init__(self, works: Sequence[dist.Work], log: Log, number: int) -> None:
        self._works, self._log, self._number = works, log, number

    def wait(self) -> None:
        self._log.wait(self._number)
        for work in self._works:
            work.wait()


class Wire(Axis):
    """An axis whose collectives are transfers between pairs, receives first.

    Args:
        group: these ranks. None where `size` is above 1: a dry one, which moves nothing and logs what would be moved.
        size: how many they are.
        place: this rank's among them.
        log: of this host.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int, place: int, log: Log) -> None:
        super().__init__(group, size, place)
        self._log = log

    def _exchange(self, out: dict[int, Tensor], into: dict[int, Tensor], elements: float) -> dist.Work:
        works: list[dist.Work] = []
        if self.group is not None:
            works = [self.group.recv([into[peer]], peer, _TAG) for peer in self._peers(-1) if peer in into]
            works += [self.group.send([out[peer]], peer, _TAG) for peer in self._peers(1) if peer in out]
        return cast(dist.Work, _All(works, self._log, self._log.start(elements)))

    def _peers(self, direction: int) -> list[int]:
        """Each begins with its neighbour, so that nobody is everybody's first."""
        return [(self.place + direction * step) % self.size for step in range(1, self.size)]

    @override
    def all_gather(self, tensor: Tensor) -> Pending:
        if self.size == 1:
            return super().all_gather(tensor)
        own = tensor.contiguous()
        whole = own.new_empty(self.size, *own.shape)
        peers = self._peers(1)
        into = {peer: whole[peer] for peer in peers}
        work = self._exchange(dict.fromkeys(peers, own), into, own.numel() * len(peers))
        whole[self.place] = own
        return Pending(work, lambda: whole)

    @override
    def reduce_scatter(self, parts: Tensor) -> Pending:
        if self.size == 1:
            return super().reduce_scatter(parts)
        arriving = self.all_to_all(parts)
        return Pending(None, lambda: arriving.wait().sum(0))

    @override
    def all_to_all(self, parts: Tensor) -> Pending:
        if self.size == 1:
            return super().all_to_all(parts)
        out, arrived = parts.contiguous(), torch.empty_like(parts, memory_format=torch.contiguous_format)
        peers = self._peers(1)
        elements = out[0].numel() * len(peers)
        work = self._exchange({p: out[p] for p in peers}, {p: arrived[p] for p in peers}, elements)
        arrived[self.place] = out[self.place]
        return Pending(work, lambda: arrived)

    @override
    def all_reduce(self, tensor: Tensor) -> Pending:
        if self.size == 1:
            return super().all_reduce(tensor)
        number = self._log.start(2 * tensor.numel() * (self.size - 1) / self.size)
        works = [] if self.group is None else [dist.all_reduce(tensor, group=self.group, async_op=True)]
        return Pending(cast(dist.Work, _All(works, self._log, number)), lambda: tensor)

    def shift(self, own: Tensor, step: int) -> Pending:
        """What the rank `step` places on has; the one `step` places back gets `own`. All do so at a time."""
        if step % self.size == 0:
            return Pending(None, lambda: own)
        arriving = torch.empty_like(own)
        to, origin = (self.place - step) % self.size, (self.place + step) % self.size
        return Pending(self._exchange({to: own}, {origin: arriving}, own.numel()), lambda: arriving)


def wires(log: Log) -> type[Axis]:
    """What makes them, for a grid."""
    return cast(type[Axis], partial(Wire, log=log))
