"""Copies what a rank saves to host memory, so that training can go on while a thread writes it.

training's stream   ... backward, step | copies | forward, backward, step ...     the next step waits for no copy's end
writing thread                                  | waits for the copies | writes, hashes, commits
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_hanayo.checkpoint.format.region import Region
from lightning_hanayo.checkpoint.save.part import RankPart, TensorPart


@dataclass(frozen=True)
class Snapshot:
    """A rank's part in host memory, which may still be on its way there."""

    part: RankPart
    copied: tuple[torch.Event, ...]
    """on each device, after its copies"""

    def wait(self) -> RankPart:
        """Wait until all copies have ended, and return the part."""
        for event in self.copied:
            event.synchronize()
        return self.part


class HostBuffers:
    """Takes one snapshot after another into the same memory; on CUDA it is pinned, so that no host waits for a copy.

    A snapshot is overwritten by the next one.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Region], Tensor] = {}

    def snapshot(self, part: RankPart) -> Snapshot:
        """Copy the part's tensors, on the streams that compute with them."""
        self._buffers = {_key(one): self._buffer(one) for one in part.tensors}  # others are freed
        for one in part.tensors:
            self._buffers[_key(one)].copy_(one.tensor.detach(), non_blocking=True)
        tensors = tuple(replace(one, tensor=self._buffers[_key(one)]) for one in part.tensors)
        devices = dict.fromkeys(one.tensor.device for one in part.tensors if one.tensor.device.type != "cpu")
        return Snapshot(replace(part, tensors=tensors), tuple(map(_recorded, devices)))

    def _buffer(self, part: TensorPart) -> Tensor:
        tensor, is_pinned = part.tensor, part.tensor.is_cuda
        buffer = self._buffers.get(_key(part))
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
        return buffer


def _key(part: TensorPart) -> tuple[str, Region]:
    return part.name, part.region


def _recorded(device: torch.device) -> torch.Event:
    """An event in the device's current stream."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
