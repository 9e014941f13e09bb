"""The transport: the abstract interface that moves flat buffers from one pipeline rank to another.

`ProcessGroupTransport` uses gloo and NCCL. In tests all ranks may be threads of one process, without a network.
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
    """Point-to-point transfers among the ranks of one pipeline.

    Only `Work.wait` blocks. Buffers from one rank to another keep their order. Sender and receiver use the same tag,
    and buffers of the same size.
    """

    rank: int
    num_ranks: int
    device: torch.device

    @property
    def host(self) -> "Transport":
        """The transport for buffers in the host's memory: this one, unless messages have channels of their own."""
        return self

    @abstractmethod
    def send(self, peer: int, tag: int, buffer: Tensor) -> Work:
        """Start to send `buffer` to pipeline rank `peer`."""

    @abstractmethod
    def receive(self, peer: int, tag: int, buffer: Tensor) -> Work:
        """Start to fill `buffer` with what pipeline rank `peer` sends."""

    @abstractmethod
    def close(self) -> None:
        """Drop the references to the connections, after a failure: they close, and waiting peers get an error."""
