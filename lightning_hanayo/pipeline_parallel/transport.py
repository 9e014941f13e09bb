"""The process-group transport: sends buffers with `torch.distributed`, over its channels or over gloo."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.monitor.hangs.waiting import Waiting
from lightning_hanayo.runtime.comm.transport import Transport, Work

OnFailure = Callable[[Exception], NoReturn]
"""Called with the error of a transfer; raises one that names the rank that failed first."""


class Transfer(NamedTuple):
    """Tells a transfer from all others between two ranks."""

    peer: int
    """rank of the world"""
    tag: int
    sends: bool
    num_ranks: int
    """of the transport, which tells transports between the same two ranks apart"""
    number: int
    """of the transfers to or from that peer with this tag, from 1 on"""


@dataclass(slots=True)
class ReportingWork:
    """A transfer whose errors go to `on_failure`."""

    work: dist.Work
    on_failure: OnFailure
    transfer: Transfer
    """for reports of runs in which nothing moves"""

    def wait(self) -> None:
        """Block until the buffer is sent, or filled."""
        try:
            with Waiting(None, self.transfer):
                self.work.wait()
        except RuntimeError as error:
            self.on_failure(error)


class ProcessGroupTransport(Transport):
    """Transfers among the ranks of one pipeline, over `torch.distributed`.

    NCCL runs the transfers of one communicator in the order in which they were posted. In one communicator for all
    ranks, or for both directions, messages would wait for each other. So on GPUs each ordered pair of ranks has a
    communicator of its own. Where there are no channels, and in `host`, buffers go over the control group, where tags
    distinguish them.

    Args:
        ranks: the global ranks of the pipeline, in pipeline order.
        control: a gloo group over `ranks`.
        channels: for messages on `device`, a group of two for each (sender, receiver), by pipeline rank.
        device: where the tensors of messages are.
        on_failure: called when a transfer fails.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        control: dist.ProcessGroup,
        channels: Mapping[tuple[int, int], dist.ProcessGroup],
        device: torch.device,
        on_failure: OnFailure,
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.num_ranks = len(ranks)
        self.device = device
        self._control: dist.ProcessGroup | None = control
        self._channels = dict(channels)
        self._on_failure = on_failure
        self._host: ProcessGroupTransport | None = None
        self._latest: dict[tuple[int, int, bool], Transfer] = {}
        """by peer, tag and whether this rank sends"""
        if channels:
            cpu = torch.device("cpu")
            self._host = ProcessGroupTransport(ranks, control=control, channels={}, device=cpu, on_failure=on_failure)

    @property
    def started(self) -> list[Transfer]:
        """The latest transfers that were started: one for each peer, tag and direction. For any thread."""
        own = list(self._latest.values())
        return own if self._host is None else own + self._host.started

    @property
    @override
    def host(self) -> Transport:
        return self._host or self

    @override
    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        self._control = None
        self._channels.clear()

    @override
    def send(self, peer: int, tag: int, buffer: Tensor) -> Work:
        try:
            transfer = self._count(peer, tag, sends=True)
            group, group_rank = self._group(peer, (self.rank, peer))
            return ReportingWork(group.send([buffer], group_rank, tag), self._on_failure, transfer)
        except RuntimeError as error:
            self._on_failure(error)

    @override
    def receive(self, peer: int, tag: int, buffer: Tensor) -> Work:
        try:
            transfer = self._count(peer, tag, sends=False)
            group, group_rank = self._group(peer, (peer, self.rank))
            return ReportingWork(group.recv([buffer], group_rank, tag), self._on_failure, transfer)
        except RuntimeError as error:
            self._on_failure(error)

    def _count(self, peer: int, tag: int, *, sends: bool) -> Transfer:
        earlier = self._latest.get((peer, tag, sends))
        number = 1 if earlier is None else earlier.number + 1
        transfer = self._latest[peer, tag, sends] = Transfer(self.ranks[peer], tag, sends, self.num_ranks, number)
        return transfer

    def _group(self, peer: int, pair: tuple[int, int]) -> tuple[dist.ProcessGroup, int]:
        """The group for a transfer from `pair[0]` to `pair[1]`, and the peer's rank in it."""
        assert self._control is not None, "the transport is closed"
        return (self._channels[pair], int(peer > self.rank)) if self._channels else (self._control, peer)
