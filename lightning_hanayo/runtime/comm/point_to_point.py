"""The point-to-point channel: sends messages between stages, each in one buffer whose size both ranks know beforehand.

Both sides keep, for every message of a batch with a given signature (shapes and kind of step), the spec it had last
time. The receiver posts a buffer of that size early. If the spec has changed, the sender sends that buffer with a
header that says so, and the new spec and the payload follow on the control group. So there is no handshake, and shapes
may change at any time.

    agreed:      |header 0| tensors |
    changed:     |header n|  unused |      then   | spec, n bytes |      then   | header | tensors |

With buffers on a GPU the header is sent before the buffer, as a message of its own on the control group: to read it in
the buffer, the host would have to wait until the device has finished all earlier work.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_hanayo.runtime.comm.codec import SendBuffer, Spec, header, header_buffer, set_header, spec_of, unpack
from lightning_hanayo.runtime.comm.message import Message
from lightning_hanayo.runtime.comm.transport import Transport, Work

_CPU = torch.device("cpu")
MAX_SIGNATURES = 64
"""how many signatures' specs are kept: those of the latest batches"""
MAX_SPARE_BUFFERS = 2
"""how many unused buffers of one spec are kept for the next messages: more would be idle memory"""
MAX_SPARE_SPECS = 512
"""how many specs have such buffers: a plain value that differs in each batch makes a new spec each time"""


class MessageKey(NamedTuple):
    """One message of a batch: between `stage` and the next one, forward (activations) or backward (gradients)."""

    stage: int
    direction: Literal["forward", "backward"]
    microbatch: int

    @property
    def tag(self) -> int:
        """Differs between all messages of a batch. The next number is the tag of a changed spec and its payload."""
        return 2 + 2 * (2 * (self.stage << 16 | self.microbatch) + (self.direction == "backward"))


class PendingReceive(NamedTuple):
    """A message that this rank is receiving."""

    peer: int
    header: Tensor
    """where its header will be written: the buffer, or the message before it"""
    works: tuple[Work, ...]
    message: Message | None
    """what the buffer holds once it is received; None if no spec is agreed yet"""


PendingSend = tuple[SendBuffer | Tensor, Work]
"""A buffer that this rank is sending."""


class PointToPointChannel:
    """Sends and receives messages over a transport. Call `begin_batch` for each batch, `finish` after the last one.

    Headers are sent as messages of their own if `separate_headers`; None: if the transport's device is not the CPU.
    """

    def __init__(self, transport: Transport, *, separate_headers: bool | None = None) -> None:
        self.transport = transport
        self._separate_headers = transport.device.type != "cpu" if separate_headers is None else separate_headers
        self._unchanged_header = header_buffer(0)
        self._specs_by_signature: dict[int, dict[MessageKey, Spec]] = {}
        self._specs: dict[MessageKey, Spec] = {}
        self._receives: dict[MessageKey, PendingReceive] = {}
        self._sends: dict[MessageKey, list[PendingSend]] = {}
        self._previous_sends: list[PendingSend] = []
        self._spare_buffers: defaultdict[Spec, list[SendBuffer]] = defaultdict(list)

    def begin_batch(self, signature: int) -> None:
        """Start a batch. All ranks give the same `signature`, so they also drop the same old ones.

        Messages of the batch before may still be under way: a rank receives them when it reaches that point of its
        program, and nothing waits for that at the end of a batch. Those of the batch before that are surely received.
        """
        self._wait_and_recycle(self._previous_sends)
        self._previous_sends = [send for sends in self._sends.values() for send in sends]
        self._sends.clear()
        self._specs = self._specs_by_signature.pop(signature, {})
        self._specs_by_signature[signature] = self._specs
        if len(self._specs_by_signature) > MAX_SIGNATURES:
            self._specs_by_signature.pop(next(iter(self._specs_by_signature)))
            self._spare_buffers.clear()

    def start_transfers(
        self, sends: Sequence[tuple[MessageKey, int, Message]], receives: Sequence[tuple[MessageKey, int]]
    ) -> None:
        """Start sends, then receives, without blocking; each `int` is the other rank, which may be waiting already."""
        transport, specs = self.transport, self._specs
        for key, peer, message in sends:
            spec = specs.get(key)
            if spec is not None and spec.matches(message):
                spare = self._spare_buffers[spec]
                buffer = spare.pop() if spare else SendBuffer(spec, transport.device)
                buffer.fill(message.tensors)
                headers: list[PendingSend] = []
                if self._separate_headers:
                    headers = [(self._unchanged_header, transport.send(peer, key.tag, self._unchanged_header))]
                self._sends[key] = [*headers, (buffer, transport.send(peer, key.tag, buffer.buffer))]
            else:
                self._sends[key] = self._send_changed(key, peer, message)
        for key, peer in receives:
            self._receives[key] = self._start_receive(key, peer)

    def wait_receive(self, key: MessageKey) -> Message:
        """Wait for the message of `key`, whose receive has been started, and return it."""
        peer, head, works, message = self._receives.pop(key)
        for work in works:
            work.wait()
        length = header(head)
        if not length:
            assert message is not None, "a message without an agreed spec begins with a header that is not 0"
            return message
        text = self._receive_changed(key, peer, torch.empty(length, dtype=torch.uint8))
        self._specs[key] = spec = Spec.from_bytes(text.numpy().tobytes())
        return unpack(spec, self._receive_changed(key, peer, spec.new_buffer(_CPU)).to(self.transport.device))

    def wait_sends(self, keys: Iterable[MessageKey]) -> None:
        """Wait until these messages are sent; their buffers can be used again."""
        for key in keys:
            self._wait_and_recycle(self._sends.pop(key, ()))

    def finish(self) -> None:
        """Wait until all messages are sent."""
        self._wait_and_recycle(self._previous_sends)
        self._previous_sends = []
        self.wait_sends(list(self._sends))

    def forget(self) -> None:
        """Drop all that is under way, after a failure."""
        self._receives.clear()
        self._sends.clear()
        self._previous_sends.clear()

    def _wait_and_recycle(self, sends: Iterable[PendingSend]) -> None:
        for sent, work in sends:
            work.wait()
            if len(self._spare_buffers) > MAX_SPARE_SPECS:
                self._spare_buffers.clear()
            if isinstance(sent, SendBuffer) and len(spare := self._spare_buffers[sent.spec]) < MAX_SPARE_BUFFERS:
                spare.append(sent)

    def _start_receive(self, key: MessageKey, peer: int) -> PendingReceive:
        """Start to receive a message of the agreed spec; the tensors are views of its buffer, made while it comes."""
        transport, spec = self.transport, self._specs.get(key)
        if spec is None:
            head = header_buffer(0)
            return PendingReceive(peer, head, (transport.receive(peer, key.tag, head),), None)
        buffer = spec.new_buffer(transport.device)
        if not self._separate_headers:
            works: tuple[Work, ...] = (transport.receive(peer, key.tag, buffer),)
            return PendingReceive(peer, buffer, works, unpack(spec, buffer))
        head = header_buffer(0)
        works = tuple(transport.receive(peer, key.tag, one) for one in (head, buffer))
        return PendingReceive(peer, head, works, unpack(spec, buffer))

    def _send_changed(self, key: MessageKey, peer: int, message: Message) -> list[PendingSend]:
        """Send the buffer that the receiver expects, with the new spec's length as header; then spec and payload."""
        expected = self._specs.get(key)
        self._specs[key] = spec = spec_of(message)
        text = torch.frombuffer(bytearray(spec.to_bytes()), dtype=torch.uint8)
        payload = SendBuffer(spec, _CPU)
        payload.fill(message.tensors)
        first = [] if expected is None else [expected.new_buffer(self.transport.device)]
        if first and not self._separate_headers:
            set_header(first[0], text.numel())
        else:
            first.insert(0, header_buffer(text.numel()))
        posts = [*((key.tag, buffer) for buffer in first), (key.tag + 1, text), (key.tag + 1, payload.buffer)]
        return [(buffer, self.transport.send(peer, tag, buffer)) for tag, buffer in posts]

    def _receive_changed(self, key: MessageKey, peer: int, buffer: Tensor) -> Tensor:
        self.transport.receive(peer, key.tag + 1, buffer).wait()
        return buffer
