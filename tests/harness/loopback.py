"""The loopback transport: all ranks are threads of one process. It copies buffers, as a real transport does."""

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.overlap.link_queue import Work
from lightning_hanayo.pipeline_parallel.transport import Transport


class Hub:
    """Connects the loopback transports of `num_ranks` ranks."""

    def __init__(self, num_ranks: int, timeout: float = 30.0) -> None:
        self.num_ranks = num_ranks
        self.timeout = timeout
        self.queues: defaultdict[tuple[int, int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)

    def transports(self) -> list["LoopbackTransport"]:
        """One transport for each rank."""
        return [LoopbackTransport(self, rank) for rank in range(self.num_ranks)]


class _Sent:
    def wait(self) -> None:
        return None


@dataclass(frozen=True)
class _Receiving:
    queue: "SimpleQueue[Tensor]"
    peer: int
    tag: int
    buffer: Tensor
    timeout: float

    def wait(self) -> None:
        try:
            data = self.queue.get(timeout=self.timeout)
        except Empty:
            message = f"nothing was received from pipeline rank {self.peer} (tag {self.tag}) within {self.timeout} s"
            raise TimeoutError(message) from None
        if data.nbytes != self.buffer.nbytes:
            raise RuntimeError(
                f"pipeline rank {self.peer} sent {data.nbytes} bytes, expected {self.buffer.nbytes} (tag {self.tag})"
            )
        self.buffer.view(torch.uint8).copy_(data.view(torch.uint8))


class LoopbackTransport(Transport):
    """One rank's end of a `Hub`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.num_ranks = hub.num_ranks
        self.device = torch.device("cpu")

    def running(self) -> AbstractContextManager[None]:
        """What the rank's thread runs in."""
        return nullcontext()

    @override
    def close(self) -> None:
        """Do nothing: there is no connection."""

    @override
    def send(self, peer: int, tag: int, buffer: Tensor, **_: bool) -> Work:
        self.hub.queues[self.rank, peer, tag].put(buffer.clone())
        return _Sent()

    @override
    def receive(self, peer: int, tag: int, buffer: Tensor, **_: bool) -> Work:
        return _Receiving(self.hub.queues[peer, self.rank, tag], peer, tag, buffer, self.hub.timeout)
