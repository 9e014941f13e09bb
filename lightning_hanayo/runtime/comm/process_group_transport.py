"""The process-group transport: sends buffers with `torch.distributed`, over its channels or over gloo."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.runtime.comm.transport import Transport, Work

OnFailure = Callable[[Exception], NoReturn]
"""Called with the error of a transfer; raises one that names the rank that failed first."""


@dataclass(slots=True)
class _ReportingWork:
    """A transfer whose errors go to `on_failure`."""

    work: dist.Work
    on_failure: OnFailure

    def wait(self) -> None:
        try:
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
        self.rank = tuple(ranks).index(dist.get_rank())
        self.num_ranks = len(ranks)
        self.device = device
        self._control: dist.ProcessGroup | None = control
        self._channels = dict(channels)
        self._on_failure = on_failure
        self._host: ProcessGroupTransport | None = None
        if channels:
            cpu = torch.device("cpu")
            self._host = ProcessGroupTransport(ranks, control=control, channels={}, device=cpu, on_failure=on_failure)

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
            group, group_rank = self._group(peer, (self.rank, peer))
            return _ReportingWork(group.send([buffer], group_rank, tag), self._on_failure)
        except RuntimeError as error:
            self._on_failure(error)

    @override
    def receive(self, peer: int, tag: int, buffer: Tensor) -> Work:
        try:
            group, group_rank = self._group(peer, (peer, self.rank))
            return _ReportingWork(group.recv([buffer], group_rank, tag), self._on_failure)
        except RuntimeError as error:
            self._on_failure(error)

    def _group(self, peer: int, pair: tuple[int, int]) -> tuple[dist.ProcessGroup, int]:
        """The group for a transfer from `pair[0]` to `pair[1]`, and the peer's rank in it."""
        assert self._control is not None, "the transport is closed"
        return (self._channels[pair], int(peer > self.rank)) if self._channels else (self._control, peer)
