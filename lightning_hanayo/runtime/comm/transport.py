"""The transport: how flat buffers get from one pipeline rank to another.

Abstract; its leaves are `ProcessGroupTransport` (gloo, NCCL) and `LoopbackTransport` (all ranks are threads).
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Block until the buffer is sent, or filled."""


class Transport(ABC):
    """Point-to-point messages among the ranks of one pipeline.

    Nothing here blocks but `Work.wait`. Messages from one rank to another keep their order. Both sides give the same
    tag, and buffers of the same size.
    """

    rank: int
    num_ranks: int
    device: torch.device

    @abstractmethod
    def send(self, peer: int, tag: int, buffer: Tensor) -> Work:
        """Start to send `buffer` to pipeline rank `peer`."""

    @abstractmethod
    def receive(self, peer: int, tag: int, buffer: Tensor) -> Work:
        """Start to fill `buffer` with what pipeline rank `peer` sends."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the connections, after a failure: with the last reference they close, which wakes the peers."""
