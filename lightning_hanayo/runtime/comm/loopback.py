"""The loopback transport: all pipeline ranks are threads of one process. It copies as the real one does."""

from collections import defaultdict
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.runtime.comm.transport import Transport, Work


class Hub:
    """The wires between `num_ranks` loopback transports."""

    def __init__(self, num_ranks: int, timeout: float = 30.0) -> None:
        self.num_ranks = num_ranks
        self.timeout = timeout
        self.wires: defaultdict[tuple[int, int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)

    def transports(self) -> list["LoopbackTransport"]:
        """One transport for each rank."""
        return [LoopbackTransport(self, rank) for rank in range(self.num_ranks)]


@dataclass(frozen=True)
class _Sent:
    def wait(self) -> None:
        return None


@dataclass(frozen=True)
class _Receiving:
    wire: "SimpleQueue[Tensor]"
    peer: int
    tag: int
    buffer: Tensor
    timeout: float

    def wait(self) -> None:
        try:
            data = self.wire.get(timeout=self.timeout)
        except Empty:
            message = f"nothing came from pipeline rank {self.peer} (tag {self.tag}) in {self.timeout} s"
            raise TimeoutError(message) from None
        if data.nbytes != self.buffer.nbytes:
            raise RuntimeError(f"sent {data.nbytes} bytes, expected {self.buffer.nbytes} (tag {self.tag})")
        self.buffer.view(torch.uint8).copy_(data.view(torch.uint8))


class LoopbackTransport(Transport):
    """One rank's end of a `Hub`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.num_ranks = hub.num_ranks
        self.device = torch.device("cpu")

    @override
    def close(self) -> None:
        """Nothing holds a connection."""

    @override
    def send(self, peer: int, tag: int, buffer: Tensor) -> Work:
        self.hub.wires[self.rank, peer, tag].put(buffer.clone())
        return _Sent()

    @override
    def receive(self, peer: int, tag: int, buffer: Tensor) -> Work:
        return _Receiving(self.hub.wires[peer, self.rank, tag], peer, tag, buffer, self.hub.timeout)
