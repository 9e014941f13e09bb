"""The process-group transport: gloo on CPU, NCCL on GPUs."""

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.runtime.comm.transport import Transport, Work

OnFailure = Callable[[Exception], NoReturn]
"""Called with what a transfer raised; says who failed first, and raises."""


class _Guarded:
    __slots__ = ("_on_failure", "_work")

    def __init__(self, work: dist.Work, on_failure: OnFailure) -> None:
        self._work, self._on_failure = work, on_failure

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._on_failure(error)


class ProcessGroupTransport(Transport):
    """Messages among the ranks of one pipeline, over `torch.distributed`.

    NCCL plays the transfers of one communicator in the order in which they were posted. So on GPUs each ordered pair of
    ranks that exchanges buffers has a communicator of its own: there a receive posted early stands in nobody's way. (In
    one communicator for all peers, or for both directions, receives posted ahead could wait for each other.) Buffers on
    the CPU go over the control group, where tags tell messages apart.

    Args:
        ranks: the global ranks of the pipeline, in pipeline order.
        control: a gloo group over `ranks`.
        channels: for buffers on a GPU, a group of two for each (sender, receiver), by pipeline rank.
        device: where the payload lies.
        on_failure: see `OnFailure`.
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

    @override
    def close(self) -> None:
        self._control = None
        self._channels.clear()

    @override
    def send(self, peer: int, tag: int, buffer: Tensor) -> Work:
        try:
            group, place = self._group(buffer, peer, (self.rank, peer))
            return _Guarded(group.send([buffer], place, tag), self._on_failure)
        except RuntimeError as error:
            self._on_failure(error)

    @override
    def receive(self, peer: int, tag: int, buffer: Tensor) -> Work:
        try:
            group, place = self._group(buffer, peer, (peer, self.rank))
            return _Guarded(group.recv([buffer], place, tag), self._on_failure)
        except RuntimeError as error:
            self._on_failure(error)

    def _group(self, buffer: Tensor, peer: int, pair: tuple[int, int]) -> tuple[dist.ProcessGroup, int]:
        """The group for a transfer from `pair[0]` to `pair[1]`, and the peer's rank in it."""
        if not buffer.is_cuda:
            assert self._control is not None, "this rank has left its pipeline"
            return self._control, peer
        return self._channels[pair], int(peer > self.rank)
