"""The transport: how flat buffers get from one pipeline rank to another.

Abstract; its leaves are `ProcessGroupTransport` (gloo, NCCL) and `LoopbackTransport` (all ranks are threads).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Block until the buffer is sent, or filled."""


@dataclass(frozen=True)
class Post:
    """One buffer to send to, or to receive from, pipeline rank `peer`. Both sides give the same `tag`."""

    direction: Literal["send", "receive"]
    peer: int
    tag: int
    buffer: Tensor


class Transport(ABC):
    """Point-to-point messages among the ranks of one pipeline.

    Nothing here blocks but `Work.wait`. Messages from one rank to another keep their order.
    """

    rank: int
    num_ranks: int
    device: torch.device

    @abstractmethod
    def start(self, posts: Sequence[Post]) -> list[Work]:
        """Start one batch of transfers; crossing ones belong into one batch. Called by both peers."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the connections, after a failure: with the last reference they close, which wakes the peers."""
