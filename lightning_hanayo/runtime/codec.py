"""The codec: a message as one flat buffer of bytes, and its spec, which says how to read them.

buffer   | 64 B: bytes of a correction that follows, 0 = as agreed | tensor 0 | tensor 1 | ...   (64 B aligned)
spec     (skeleton, ((dtype, shape, requires_grad), ...))          travels only when it isn't the agreed one
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.runtime.packet import Packet
from lightning_hanayo.runtime.tree import Skeleton

ALIGN = 64
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NAMES = {value: name for name, value in _DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """How to read a buffer: the tree's skeleton, and dtype, shape and requires_grad of each tensor."""

    skeleton: Skeleton
    tensors: tuple[tuple[str, tuple[int, ...], bool], ...]

    @cached_property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """Where each tensor begins and ends in the buffer, in bytes."""
        spans, start = [], ALIGN
        for dtype, shape, _ in self.tensors:
            stop = start + prod(shape) * _DTYPES[dtype].itemsize
            spans.append((start, stop))
            start = -(-stop // ALIGN) * ALIGN
        return tuple(spans)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self.extents[-1][1] if self.extents else ALIGN

    def empty(self) -> list[Tensor]:
        """Tensors of that kind on the CPU, without values."""
        return [torch.empty(shape, dtype=_DTYPES[dtype]) for dtype, shape, _ in self.tensors]

    def to_bytes(self) -> bytes:
        """As JSON: nothing that crosses is ever unpickled."""
        return json.dumps([self.skeleton, self.tensors]).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "Spec":
        """The spec that `to_bytes` wrote."""
        skeleton, tensors = _tuples(json.loads(data))
        return Spec(skeleton, tensors)


def _tuples(node: Any) -> Any:
    return tuple(map(_tuples, node)) if isinstance(node, list) else node


def spec_of(packet: Packet) -> Spec:
    """How to read the buffer that `pack` makes of `packet`."""
    return Spec(packet.skeleton, tuple((_NAMES[t.dtype], tuple(t.shape), t.requires_grad) for t in packet.tensors))


def pack(spec: Spec, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One buffer of `spec.num_bytes` bytes with the tensors copied in and a header that says: as agreed."""
    buffer = torch.empty(spec.num_bytes, dtype=torch.uint8, device=device)
    buffer[:ALIGN] = 0
    for (start, stop), tensor in zip(spec.extents, tensors, strict=True):
        buffer[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return buffer


def unpack(spec: Spec, buffer: Tensor) -> Packet:
    """The packet in `buffer`. Its tensors lie in the buffer; those that need a gradient are marked.

    They are no views of it (`.data`): views share one version counter, so that autograd would take a block's work in
    place on one of them for a change to all.
    """
    tensors = tuple(
        buffer[start:stop].view(_DTYPES[dtype]).view(shape).data.requires_grad_(requires_grad)
        for (start, stop), (dtype, shape, requires_grad) in zip(spec.extents, spec.tensors, strict=True)
    )
    return Packet(spec.skeleton, tensors)


def header(buffer: Tensor) -> int:
    """Bytes of the correction that follows this buffer; 0 if it is as agreed. (On CUDA this waits for the buffer.)"""
    return int(buffer[:8].view(torch.int64).item())


def set_header(buffer: Tensor, value: int) -> None:
    """Write what `header` reads."""
    buffer[:8].view(torch.int64).fill_(value)


def stable_hash(text: str) -> int:
    """A number below 2^53 that is the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest())
