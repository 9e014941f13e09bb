"""The message from one stage to the next or the previous one, a structure and a list of tensors, and its codec.

A message is packed into one flat buffer of bytes; a spec describes how to read it.

buffer   | tensor 0 | tensor 1 | ...   (256 B aligned) | 64 B header: 0, or the bytes of a new spec that follows
spec     (skeleton, ((dtype, shape, requires_grad), ...))          sent only if it differs from the agreed one
"""

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_hanayo.pipeline_parallel.pytree import Skeleton


class MessageKey(NamedTuple):
    """One message of a batch: between `stage` and the next one, forward (activations) or backward (gradients)."""

    stage: int
    direction: Literal["forward", "backward"]
    microbatch: int

    @property
    def tag(self) -> int:
        """Differs between all messages of a batch. The next number is the tag of a changed spec and its payload."""
        return 2 + 2 * (2 * (self.stage << 16 | self.microbatch) + (self.direction == "backward"))

    def __str__(self) -> str:
        value = "activation of stage" if self.direction == "forward" else "gradient for the output of stage"
        return f"the {value} {self.stage}, micro-batch {self.microbatch}"


class Message(NamedTuple):
    """A flattened tree. `skeleton` is hashable and holds plain values only, so two ranks can agree on it once."""

    skeleton: Skeleton
    tensors: tuple[Tensor, ...]

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors that get a gradient, in the order in which the gradients come back."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def detached(self) -> "Message":
        """The same message outside the graph that made it, as if it had been received. Memory is shared."""
        tensors = [t.detach().requires_grad_() if t.requires_grad else t for t in self.tensors]
        return Message(self.skeleton, tuple(tensors))


def gradient_message(gradients: Sequence[Tensor | None]) -> Message:
    """A message with the gradients of another one's `differentiable` tensors; None where there is no gradient."""
    present = [gradient is not None for gradient in gradients]
    return Message(("gradients", *present), tuple([gradient for gradient in gradients if gradient is not None]))


def unpack_gradients(message: Message) -> list[Tensor | None]:
    """The gradients that `gradient_message` was given."""
    gradients = iter(message.tensors)
    return [next(gradients) if present else None for present in message.skeleton[1:]]


ALIGN, HEADER = 256, 64
"""bytes: as torch aligns tensors on GPUs, so that kernels are those of one process; of a header, behind the tensors"""
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NAMES = {value: name for name, value in _DTYPES.items()}
_SENDABLE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""dtypes that every backend can send; a buffer with others, or with several dtypes, is sent as bytes"""


TensorSpec = tuple[str, tuple[int, ...], bool]


@dataclass(frozen=True, eq=False)
class Spec:
    """How to read a buffer: the skeleton, and the dtype, shape and requires_grad of each tensor. Made by `of`."""

    skeleton: Skeleton
    tensors: tuple[TensorSpec, ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(skeleton: Skeleton, tensors: tuple[TensorSpec, ...]) -> "Spec":
        """The spec with these values: the same object for all messages alike, whose buffers serve them all."""
        return Spec(skeleton, tensors)

    @cached_property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each tensor in the buffer, in bytes."""
        spans, start = [], 0
        for dtype, shape, _ in self.tensors:
            stop = start + prod(shape) * _DTYPES[dtype].itemsize
            spans.append((start, stop))
            start = -(-stop // ALIGN) * ALIGN
        return tuple(spans)

    @cached_property
    def num_bytes(self) -> int:
        """Size of the buffer, in bytes."""
        stop = self.extents[-1][1] if self.extents else 0
        return -(-stop // HEADER) * HEADER + HEADER

    @cached_property
    def buffer_dtype(self) -> torch.dtype:
        """The buffer's dtype: that of its tensors if they share one, so that they are plain views of it."""
        dtypes = {_DTYPES[name] for name, _, _ in self.tensors}
        return dtypes.pop() if len(dtypes) == 1 and dtypes <= _SENDABLE else torch.uint8

    @cached_property
    def view_args(self) -> tuple[tuple[torch.dtype, torch.Size, bool, tuple[int, ...], int], ...]:
        """For each tensor: dtype, shape, requires_grad, strides, and its start in the buffer, in elements."""
        found = []
        for (name, shape, needs), (start, _) in zip(self.tensors, self.extents, strict=True):
            dtype, strides = _DTYPES[name], tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
            found.append((dtype, torch.Size(shape), needs, strides, start // dtype.itemsize))
        return tuple(found)

    def matches(self, message: Message) -> bool:
        """Whether this is the spec of `message`."""
        tensors, expected = message.tensors, self.view_args
        if len(tensors) != len(expected) or message.skeleton != self.skeleton:
            return False
        for tensor, (dtype, shape, needs, _, _) in zip(tensors, expected, strict=True):
            if tensor.dtype is not dtype or tensor.shape != shape or tensor.requires_grad is not needs:
                return False
        return True

    def new_buffer(self, device: torch.device) -> Tensor:
        """A new buffer for a message of this spec."""
        return torch.empty(self.num_bytes // self.buffer_dtype.itemsize, dtype=self.buffer_dtype, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer, as views."""
        if buffer.dtype is self.buffer_dtype and self.buffer_dtype is not torch.uint8:
            return [buffer.as_strided(shape, strides, start) for _, shape, _, strides, start in self.view_args]
        data = buffer.view(torch.uint8)
        return [
            data[start:stop].view(dtype).view(shape)
            for (start, stop), (dtype, shape, _, _, _) in zip(self.extents, self.view_args, strict=True)
        ]

    def to_bytes(self) -> bytes:
        """The spec as JSON: received data is never unpickled."""
        return json.dumps([self.skeleton, self.tensors]).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "Spec":
        """The spec that `to_bytes` wrote."""
        return Spec.of(*_tuples(json.loads(data)))


def _tuples(node: Any) -> Any:
    return tuple(map(_tuples, node)) if isinstance(node, list) else node


def spec_of(message: Message) -> Spec:
    """The spec of `message`."""
    return Spec.of(message.skeleton, tuple((_NAMES[t.dtype], tuple(t.shape), t.requires_grad) for t in message.tensors))


class SendBuffer:
    """A buffer for messages of one spec. On the CPU its header is 0: the spec is as agreed."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec = spec
        self.buffer = spec.new_buffer(device)
        if device.type == "cpu":  # elsewhere a message's header goes ahead of it
            set_header(self.buffer, 0)
        self._views = spec.views(self.buffer)

    def fill(self, tensors: Sequence[Tensor]) -> "SendBuffer":
        """Copy the tensors into the buffer, and return it."""
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor.data)
        return self


def unpack(spec: Spec, buffer: Tensor) -> Message:
    """The message in `buffer`. Its tensors share the buffer's memory; `requires_grad` is set as in the spec.

    Several tensors are detached from it by `.data`: views share one version counter, so if a block changed one of them
    in place, autograd would think that all have changed.
    """
    tensors = spec.views(buffer)
    if len(tensors) > 1:
        tensors = [view.data for view in tensors]
    for tensor, (_, _, needs, _, _) in zip(tensors, spec.view_args, strict=True):
        if needs:
            tensor.requires_grad_()
    return Message(spec.skeleton, tuple(tensors))


def header_buffer(value: int) -> Tensor:
    """A buffer on the CPU with nothing but a header."""
    buffer = torch.empty(HEADER, dtype=torch.uint8)
    set_header(buffer, value)
    return buffer


def header(buffer: Tensor) -> int:
    """The number of bytes of the new spec that follows `buffer` (on the CPU); 0 if the spec is as agreed."""
    address = buffer.data_ptr() + buffer.nbytes - HEADER
    return ctypes.c_int64.from_address(address).value  # ten times faster than with tensor operations


def set_header(buffer: Tensor, value: int) -> None:
    """Write the number that `header` reads."""
    buffer.view(torch.uint8)[-HEADER:][:8].view(torch.int64).fill_(value)


def stable_hash(text: str) -> int:
    """A number below 2^53 that is the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest())
