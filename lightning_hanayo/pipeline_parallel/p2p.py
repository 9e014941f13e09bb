"""The point-to-point channel: sends messages between stages, at most two at a time to each rank.

    rank 0    send m0    send m1    wait for m0, send m2    wait for m1, send m3
    rank 1    receive m0 receive m1              receive m2              receive m3

Each message on its way holds a buffer, which is free when its sender has waited for it. A rank posts its receives where
the messages are sent (`schedule/communication.py`), so this takes no time unless a rank is late.

Both sides keep, for every message of a batch with a given signature (shapes and kind of step), the spec it had last
time, so that the receiver can post a buffer of that size early. A header says whether the spec has changed. Buffers on
the CPU hold their header. A changed message is one of the expected size, and the new one behind it:

    agreed     | tensors |header 0|
    changed    | unused  |header n|   then   | spec, n bytes |   then   | tensors |header|

In a buffer on a GPU the host could read it only after all earlier work of the device. So there the header goes ahead,
as a message of its own on the CPU. Without an agreed spec the receiver waits for header and spec before it posts a
buffer. Both come from the sender's host, which doesn't wait for its device, and a receive is posted where the message
is sent.

               on the CPU                            on the device
    agreed     |header 0|                            | tensors |
    new        |header n| spec, n bytes |            | tensors |
    changed    |header n| spec, n bytes | tensors |  | unused  |    once: from then on the message is like a new one

The message from one stage to the next or the previous one, a structure and a list of tensors, and its codec.

A message is packed into one flat buffer of bytes; a spec describes how to read it.

buffer   | tensor 0 | tensor 1 | ...   (256 B aligned) | 64 B header: 0, or the bytes of a new spec that follows
spec     (skeleton, ((dtype, shape, requires_grad), ...))          sent only if it differs from the agreed one
"""

import ctypes
import json
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.monitor.waiting import Waiting
from lightning_hanayo.overlap.link_queue import Work
from lightning_hanayo.pipeline_parallel.pytree import Skeleton
from lightning_hanayo.pipeline_parallel.transport import Transport


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


_CPU = torch.device("cpu")
MAX_SPARE_BUFFERS = 2
"""how many unused buffers of one spec are kept for the next messages: more would be idle memory"""
MAX_SPARE_SPECS = 32
"""how many specs have such buffers: a plain value that differs in each batch makes a new spec each time"""

PendingSend = tuple[SendBuffer | Tensor, Work]
"""A buffer that this rank is sending."""


@dataclass(frozen=True)
class Agreement:
    """Both ranks' knowledge of the messages of batches of one signature."""

    specs: dict[MessageKey, Spec] = field(default_factory=dict)
    """those that they had last time"""
    varying: set[MessageKey] = field(default_factory=set)
    """those that have changed, where headers go ahead: no buffer is posted before its spec is known"""


class Headers(ABC):
    """Sends messages and receives them under the current `agreement`."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.agreement = Agreement()
        self.late: list[PendingSend] = []
        """sent in this batch, and received when the other rank uses the message: only then does it know of them"""

    @abstractmethod
    def send(self, key: MessageKey, peer: int, message: Message) -> list[PendingSend]:
        """Start to send `message`. Returns the buffers whose receives are posted where the message is sent."""

    @abstractmethod
    def start_receive(self, key: MessageKey, peer: int) -> Callable[[], Message]:
        """Start to receive the message of `key`; return a function that waits for it and returns it."""

    def recycle(self, buffer: SendBuffer) -> None:  # noqa: B027
        """Take a buffer that has been sent."""

    def _post(self, peer: int, tag: int, buffer: SendBuffer | Tensor, *, on_host: bool = False) -> PendingSend:
        flat = buffer.buffer if isinstance(buffer, SendBuffer) else buffer
        return buffer, self.transport.send(peer, tag, flat, on_host=on_host)

    def _new_spec(self, key: MessageKey, message: Message) -> tuple[Spec, Tensor]:
        """The spec of `message`, which is agreed from now on, and its text, uint8 [n]."""
        self.agreement.specs[key] = spec = spec_of(message)
        return spec, torch.frombuffer(bytearray(spec.to_bytes()), dtype=torch.uint8)

    def _receive_spec(self, key: MessageKey, peer: int, head: Tensor) -> Spec:
        """The spec behind the header in `head`, which is agreed from now on."""
        text = torch.empty(header(head), dtype=torch.uint8)
        self.transport.receive(peer, key.tag + 1, text, on_host=True).wait()
        self.agreement.specs[key] = spec = Spec.from_bytes(text.numpy().tobytes())
        return spec

    def _receive_changed(self, key: MessageKey, peer: int, head: Tensor) -> Message:
        """The message behind the header in `head`, over the CPU."""
        spec = self._receive_spec(key, peer, head)
        buffer = spec.new_buffer(_CPU)
        self.transport.receive(peer, key.tag + 1, buffer, on_host=True).wait()
        return unpack(spec, buffer.to(self.transport.device))


class HeadersInBuffers(Headers):
    """For buffers on the CPU, which are used again: memory that is new to the process is slow there."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._spare: defaultdict[Spec, list[SendBuffer]] = defaultdict(list)

    @override
    def send(self, key: MessageKey, peer: int, message: Message) -> list[PendingSend]:
        expected = self.agreement.specs.get(key)
        if expected is not None and expected.matches(message):
            return [self._post(peer, key.tag, self._filled(expected, message))]
        spec, text = self._new_spec(key, message)
        first = header_buffer(0) if expected is None else expected.new_buffer(self.transport.device)
        set_header(first, text.numel())
        posted = [self._post(peer, key.tag, first)]
        self.late += [self._post(peer, key.tag + 1, one) for one in (text, self._filled(spec, message))]
        return posted

    @override
    def start_receive(self, key: MessageKey, peer: int) -> Callable[[], Message]:
        spec = self.agreement.specs.get(key)
        buffer = header_buffer(0) if spec is None else spec.new_buffer(self.transport.device)
        message = None if spec is None else unpack(spec, buffer)  # its tensors are made while the buffer comes
        work = self.transport.receive(peer, key.tag, buffer)

        def wait() -> Message:
            work.wait()
            if header(buffer):
                return self._receive_changed(key, peer, buffer)
            assert message is not None, "a message without an agreed spec begins with a header that is not 0"
            return message

        return wait

    @override
    def recycle(self, buffer: SendBuffer) -> None:
        if len(self._spare) > MAX_SPARE_SPECS:
            self._spare.clear()
        if len(spare := self._spare[buffer.spec]) < MAX_SPARE_BUFFERS:
            spare.append(buffer)

    def _filled(self, spec: Spec, message: Message) -> SendBuffer:
        spare = self._spare.get(spec)
        buffer = spare.pop() if spare else SendBuffer(spec, self.transport.device)
        return buffer.fill(message.tensors)


class HeadersAhead(Headers):
    """For buffers on a device. Its allocator uses memory again by itself."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._unchanged = header_buffer(0)

    @override
    def send(self, key: MessageKey, peer: int, message: Message) -> list[PendingSend]:
        expected, spec, device = self._expected(key), self.agreement.specs.get(key), self.transport.device
        if spec is not None and spec.matches(message):
            head = [self._post(peer, key.tag, self._unchanged, on_host=True)]
        else:
            spec, text = self._new_spec(key, message)
            head = [self._post(peer, key.tag, header_buffer(text.numel()), on_host=True)]
            if expected is not None:
                self.agreement.varying.add(key)
                payload = SendBuffer(spec, _CPU).fill(message.tensors)
                head.append(self._post(peer, key.tag, expected.new_buffer(device)))
                self.late += [self._post(peer, key.tag + 1, one, on_host=True) for one in (text, payload)]
                return head
            head.append(self._post(peer, key.tag + 1, text, on_host=True))
        return [*head, self._post(peer, key.tag, SendBuffer(spec, device).fill(message.tensors))]

    @override
    def start_receive(self, key: MessageKey, peer: int) -> Callable[[], Message]:
        head = header_buffer(0)
        head_work = self.transport.receive(peer, key.tag, head, on_host=True)
        expected = self._expected(key)
        if expected is not None:
            wait_expected = self._post_buffer(key, peer, expected)

            def wait() -> Message:
                head_work.wait()
                message = wait_expected()
                if not header(head):
                    return message
                self.agreement.varying.add(key)
                return self._receive_changed(key, peer, head)

            return wait
        head_work.wait()
        spec = self._receive_spec(key, peer, head) if header(head) else self.agreement.specs[key]
        return self._post_buffer(key, peer, spec)

    def _expected(self, key: MessageKey) -> Spec | None:
        """The spec of the buffer that the receiver posts before it has read the header; None: it posts none."""
        return None if key in self.agreement.varying else self.agreement.specs.get(key)

    def _post_buffer(self, key: MessageKey, peer: int, spec: Spec) -> Callable[[], Message]:
        buffer = spec.new_buffer(self.transport.device)
        message = unpack(spec, buffer)  # its tensors are made while the buffer comes
        work = self.transport.receive(peer, key.tag, buffer)

        def wait() -> Message:
            work.wait()
            return message

        return wait


MAX_SIGNATURES = 64
"""how many signatures' specs are kept: those of the latest batches"""
MAX_IN_FLIGHT = 2
"""how many messages may be on their way to one rank, each in a buffer of its own"""


class PointToPointChannel:
    """Sends and receives messages over a transport. Call `begin_batch` for each batch, `finish` after the last one.

    Headers are sent as messages of their own if `separate_headers`; None: where messages aren't in the host's
    memory, or have channels of their own.
    """

    def __init__(self, transport: Transport, *, separate_headers: bool | None = None) -> None:
        self.transport = transport
        if separate_headers is None:
            separate_headers = transport.device.type != "cpu" or transport.has_channels
        self._headers: Headers = (HeadersAhead if separate_headers else HeadersInBuffers)(transport)
        self._agreements: dict[int, Agreement] = {}
        self._receives: dict[MessageKey, Callable[[], Message]] = {}
        self._sends: defaultdict[int, deque[Sequence[PendingSend]]] = defaultdict(deque)
        self._late_before: list[PendingSend] = []

    def begin_batch(self, signature: int) -> None:
        """Start a batch. All ranks give the same `signature`, so they also drop the same old ones.

        Messages of the batch before may still be under way: a rank receives them when it reaches that point of its
        program, and nothing waits for that at the end of a batch. Late sends are waited for a batch later.
        """
        self._wait(self._late_before)
        self._late_before, self._headers.late = self._headers.late, []
        agreement = self._agreements.pop(signature, Agreement())
        self._headers.agreement = self._agreements[signature] = agreement
        if len(self._agreements) > MAX_SIGNATURES:
            self._agreements.pop(next(iter(self._agreements)))

    def start_transfers(
        self, sends: Sequence[tuple[MessageKey, int, Message]], receives: Sequence[tuple[MessageKey, int]]
    ) -> None:
        """Start sends, then receives; each `int` is the other rank.

        It blocks while `MAX_IN_FLIGHT` messages are on their way to a rank (with a device: until that rank's host has
        posted them), and with a device for the spec of a message that is new. Neither can hang: a receive is posted
        where its message is sent in one sequence of all ranks' actions.
        """
        for key, peer, message in sends:
            in_flight = self._sends[peer]
            while len(in_flight) >= MAX_IN_FLIGHT:
                self._wait(in_flight.popleft())
            in_flight.append(self._headers.send(key, peer, message))
        for key, peer in receives:
            self._receives[key] = self._headers.start_receive(key, peer)

    def wait_receive(self, key: MessageKey) -> Message:
        """Wait for the message of `key`, whose receive has been started, and return it."""
        with Waiting(key, None):
            return self._receives.pop(key)()

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for in_flight in self._sends.values():
            while in_flight:
                self._wait(in_flight.popleft())
        self._wait([*self._late_before, *self._headers.late])
        self._late_before, self._headers.late = [], []

    def forget(self) -> None:
        """Drop all that is under way, after a failure."""
        self._receives.clear()
        self._sends.clear()
        self._late_before, self._headers.late = [], []

    def _wait(self, sent: Sequence[PendingSend]) -> None:
        for buffer, work in sent:
            work.wait()
            if isinstance(buffer, SendBuffer):
                self._headers.recycle(buffer)
