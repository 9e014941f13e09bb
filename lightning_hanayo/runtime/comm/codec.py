"""The codec: a message as one flat buffer of bytes, and its spec, which says how to read them.

buffer   | 64 B: bytes of a correction that follows, 0 = as agreed | tensor 0 | tensor 1 | ...   (64 B aligned)
spec     (skeleton, ((dtype, shape, requires_grad), ...))          travels only when it isn't the agreed one
"""

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.runtime.comm.message import Message
from lightning_hanayo.runtime.comm.pytree import Skeleton

ALIGN = 64
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NAMES = {value: name for name, value in _DTYPES.items()}
_UNITS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""dtypes that every backend can send; a buffer of several, or of others, goes as bytes"""


@dataclass(frozen=True)
class Spec:
    """How to read a buffer: the tree's skeleton, and dtype, shape and requires_grad of each tensor."""

    skeleton: Skeleton
    tensors: tuple[tuple[str, tuple[int, ...], bool], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.skeleton, self.tensors))

    @cached_property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """Where each tensor begins and ends in the buffer, in bytes."""
        spans, start = [], ALIGN
        for dtype, shape, _ in self.tensors:
            stop = start + prod(shape) * _DTYPES[dtype].itemsize
            spans.append((start, stop))
            start = -(-stop // ALIGN) * ALIGN
        return tuple(spans)

    @cached_property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self.extents[-1][1] if self.extents else ALIGN

    @cached_property
    def unit(self) -> torch.dtype:
        """The buffer's dtype: that of its tensors if they share one, so that they can be read as they lie."""
        dtypes = {_DTYPES[name] for name, _, _ in self.tensors}
        return dtypes.pop() if len(dtypes) == 1 and dtypes <= _UNITS else torch.uint8

    @cached_property
    def layout(self) -> tuple[tuple[torch.dtype, torch.Size, bool, tuple[int, ...], int], ...]:
        """Per tensor: dtype, shape, requires_grad, strides, and where it begins, counted in its own elements."""
        return tuple(
            (_DTYPES[name], torch.Size(shape), needs, _strides(shape), start // _DTYPES[name].itemsize)
            for (name, shape, needs), (start, _) in zip(self.tensors, self.extents, strict=True)
        )

    def describes(self, packet: Message) -> bool:
        """Whether it is the spec of `packet`."""
        tensors, layout = packet.tensors, self.layout
        if len(tensors) != len(layout) or packet.skeleton != self.skeleton:
            return False
        for tensor, (dtype, shape, needs, _, _) in zip(tensors, layout, strict=True):
            if tensor.dtype is not dtype or tensor.shape != shape or tensor.requires_grad is not needs:
                return False
        return True

    def room(self, device: torch.device) -> Tensor:
        """A buffer for it."""
        return torch.empty(self.num_bytes // self.unit.itemsize, dtype=self.unit, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer."""
        if buffer.dtype is self.unit and self.unit is not torch.uint8:
            return [buffer.as_strided(shape, strides, start) for _, shape, _, strides, start in self.layout]
        data = buffer.view(torch.uint8)
        return [
            data[start:stop].view(dtype).view(shape)
            for (start, stop), (dtype, shape, _, _, _) in zip(self.extents, self.layout, strict=True)
        ]

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


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(prod(shape[place + 1 :]) for place in range(len(shape)))


def _tuples(node: Any) -> Any:
    return tuple(map(_tuples, node)) if isinstance(node, list) else node


def spec_of(packet: Message) -> Spec:
    """How to read the buffer in which `packet` travels."""
    return Spec(packet.skeleton, tuple((_NAMES[t.dtype], tuple(t.shape), t.requires_grad) for t in packet.tensors))


class SendBuffer:
    """A buffer to send, laid out for one spec, to be filled again and again. Its header says: as agreed."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec = spec
        self.buffer = spec.room(device)
        set_header(self.buffer, 0)
        self._views = spec.views(self.buffer)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors in."""
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor.data)


def unpack(spec: Spec, buffer: Tensor) -> Message:
    """The packet in `buffer`. Its tensors lie in the buffer; those that need a gradient are marked.

    Several are no views of it (`.data`): views share one version counter, so that autograd would take a block's work in
    place on one of them for a change to all.
    """
    tensors = spec.views(buffer)
    if len(tensors) > 1:
        tensors = [view.data for view in tensors]
    for tensor, (_, _, needs, _, _) in zip(tensors, spec.layout, strict=True):
        if needs:
            tensor.requires_grad_()
    return Message(spec.skeleton, tuple(tensors))


def note_of(value: int) -> Tensor:
    """A header by itself, on the CPU."""
    note = torch.empty(ALIGN, dtype=torch.uint8)
    set_header(note, value)
    return note


def header(buffer: Tensor) -> int:
    """Bytes of the correction that follows this buffer, which is on the CPU; 0 if it is as agreed."""
    return ctypes.c_int64.from_address(buffer.data_ptr()).value  # ten times faster than through tensors


def set_header(buffer: Tensor, value: int) -> None:
    """Write what `header` reads."""
    buffer.view(torch.uint8)[:8].view(torch.int64).fill_(value)


def stable_hash(text: str) -> int:
    """A number below 2^53 that is the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest())
