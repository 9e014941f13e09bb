"""The loopback transport: all pipeline ranks are threads of one process. It copies as the real one does."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.runtime.transport import Post, Transport, Work


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
    post: Post
    timeout: float

    def wait(self) -> None:
        try:
            data = self.wire.get(timeout=self.timeout)
        except Empty:
            message = f"nothing came from pipeline rank {self.post.peer} (tag {self.post.tag}) in {self.timeout} s"
            raise TimeoutError(message) from None
        if data.shape != self.post.buffer.shape:
            raise RuntimeError(f"sent {data.numel()} bytes, expected {self.post.buffer.numel()} (tag {self.post.tag})")
        self.post.buffer.copy_(data)


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
    def start(self, posts: Sequence[Post]) -> list[Work]:
        works: list[Work] = []
        for post in posts:
            if post.direction == "send":
                self.hub.wires[self.rank, post.peer, post.tag].put(post.buffer.clone())
                works.append(_Sent())
            else:
                works.append(_Receiving(self.hub.wires[post.peer, self.rank, post.tag], post, self.hub.timeout))
        return works
