"""The mail: packets between stages, each in one buffer whose size both sides know before it comes.

Both sides keep, for every message of a batch of a given signature (shapes and kind of step), the spec it had last time.
The receiver posts a buffer of that size ahead of time; when the spec has changed, the sender fills the buffer with a
note, and spec and payload follow on the control group. So nothing is asked and answered, and shapes may change at will.

    agreed:      |header 0| tensors |
    changed:     |header n|  unused |      then   | spec, n bytes |      then   | header | tensors |

Where buffers lie on a GPU the header goes ahead as a note of its own, on the control group: to read it in the buffer,
the host would have to wait for all that the device has to do before.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_hanayo.runtime.comm.codec import SendBuffer, Spec, header, note_of, set_header, spec_of, unpack
from lightning_hanayo.runtime.comm.message import Message
from lightning_hanayo.runtime.comm.transport import Transport, Work

_CPU = torch.device("cpu")
REMEMBERED = 64
"""signatures whose specs are kept: shapes of batches met lately"""
SPARE = 2
"""buffers of one spec that are kept for the next messages: more would be memory that lies idle"""


class MessageKey(NamedTuple):
    """One message of a batch: over the border behind `stage`, forward (activations) or backward (gradients)."""

    stage: int
    direction: Literal["forward", "backward"]
    microbatch: int

    @property
    def tag(self) -> int:
        """Differs for all messages of a batch; its successor is the correction's."""
        return 2 + 2 * (2 * (self.stage << 16 | self.microbatch) + (self.direction == "backward"))


class PendingReceive(NamedTuple):
    """A message under way to this rank."""

    peer: int
    note: Tensor
    """where its header will stand: the buffer, or what comes ahead of it"""
    works: tuple[Work, ...]
    packet: Message | None
    """what the buffer holds once it is there; None if nothing is agreed yet"""


Leaving = tuple[SendBuffer | Tensor, Work]
"""A buffer under way to another rank."""


class PointToPointChannel:
    """Sends and receives packets over a transport. `begin` each batch, `finish` after the last one.

    Args:
        transport: takes the buffers.
        notes_apart: whether headers travel as notes of their own; None: where the transport's device isn't the CPU.
    """

    def __init__(self, transport: Transport, *, notes_apart: bool | None = None) -> None:
        self.transport = transport
        self._apart = transport.device.type != "cpu" if notes_apart is None else notes_apart
        self._fine = note_of(0)
        self._known: dict[int, dict[MessageKey, Spec]] = {}
        self._agreed: dict[MessageKey, Spec] = {}
        self._arriving: dict[MessageKey, PendingReceive] = {}
        self._leaving: dict[MessageKey, list[Leaving]] = {}
        self._late: list[Leaving] = []
        self._parcels: defaultdict[Spec, list[SendBuffer]] = defaultdict(list)

    def begin(self, signature: int) -> None:
        """Start a batch; the same `signature` on all ranks, which so forget the same ones.

        What the batch before has sent may still be on its way: a peer takes it when it comes to that point of its list,
        and nobody waits for that at the end of a batch. What was sent before that has been taken long ago.
        """
        self._let_go(self._late)
        self._late = [item for items in self._leaving.values() for item in items]
        self._leaving.clear()
        self._agreed = self._known.pop(signature, {})
        self._known[signature] = self._agreed
        if len(self._known) > REMEMBERED:
            self._known.pop(next(iter(self._known)))
            self._parcels.clear()

    def exchange(
        self, sends: Sequence[tuple[MessageKey, int, Message]], receives: Sequence[tuple[MessageKey, int]]
    ) -> None:
        """Start transfers; the `int` is the peer. Blocks for nothing. Who waits for a message gets it first."""
        transport, agreed = self.transport, self._agreed
        for route, peer, packet in sends:
            spec = agreed.get(route)
            if spec is not None and spec.describes(packet):
                free = self._parcels[spec]
                parcel = free.pop() if free else SendBuffer(spec, transport.device)
                parcel.fill(packet.tensors)
                ahead = [(self._fine, transport.send(peer, route.tag, self._fine))] if self._apart else []
                self._leaving[route] = [*ahead, (parcel, transport.send(peer, route.tag, parcel.buffer))]
            else:
                self._leaving[route] = self._change(route, peer, packet)
        for route, peer in receives:
            self._arriving[route] = self._expect(route, peer)

    def collect(self, route: MessageKey) -> Message:
        """Wait for the packet of `route`, whose receive was started before."""
        peer, note, works, packet = self._arriving.pop(route)
        for work in works:
            work.wait()
        length = header(note)
        if not length:
            assert packet is not None, "a message that isn't agreed begins with a note"
            return packet
        text = self._correction(route, peer, torch.empty(length, dtype=torch.uint8))
        self._agreed[route] = spec = Spec.from_bytes(text.numpy().tobytes())
        return unpack(spec, self._correction(route, peer, spec.room(_CPU)).to(self.transport.device))

    def release(self, routes: Iterable[MessageKey]) -> None:
        """Let go of the buffers of messages that have left; waits until they have."""
        for route in routes:
            self._let_go(self._leaving.pop(route, ()))

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self._let_go(self._late)
        self._late = []
        self.release(list(self._leaving))

    def forget(self) -> None:
        """Drop all that is under way, after a failure."""
        self._arriving.clear()
        self._leaving.clear()
        self._late.clear()

    def _let_go(self, leaving: Iterable[Leaving]) -> None:
        for sent, work in leaving:
            work.wait()
            if isinstance(sent, SendBuffer) and len(spare := self._parcels[sent.spec]) < SPARE:
                spare.append(sent)

    def _expect(self, route: MessageKey, peer: int) -> PendingReceive:
        """Start to receive what was agreed, or a note that says otherwise; it is unpacked while it is under way."""
        transport, spec = self.transport, self._agreed.get(route)
        if spec is None:
            note = note_of(0)
            return PendingReceive(peer, note, (transport.receive(peer, route.tag, note),), None)
        buffer = spec.room(transport.device)
        if not self._apart:
            works: tuple[Work, ...] = (transport.receive(peer, route.tag, buffer),)
            return PendingReceive(peer, buffer, works, unpack(spec, buffer))
        note = note_of(0)
        works = tuple(transport.receive(peer, route.tag, one) for one in (note, buffer))
        return PendingReceive(peer, note, works, unpack(spec, buffer))

    def _change(self, route: MessageKey, peer: int, packet: Message) -> list[Leaving]:
        """Send what the receiver expects, with a header that says otherwise, and what is true behind it."""
        known = self._agreed.get(route)
        self._agreed[route] = spec = spec_of(packet)
        text = torch.frombuffer(bytearray(spec.to_bytes()), dtype=torch.uint8)
        payload = SendBuffer(spec, _CPU)
        payload.fill(packet.tensors)
        room = None if known is None else known.room(self.transport.device)
        if room is None or self._apart:
            expected = [note_of(text.numel()), *([] if room is None else [room])]
        else:
            set_header(room, text.numel())
            expected = [room]
        posts = [*((route.tag, one) for one in expected), (route.tag + 1, text), (route.tag + 1, payload.buffer)]
        return [(buffer, self.transport.send(peer, tag, buffer)) for tag, buffer in posts]

    def _correction(self, route: MessageKey, peer: int, buffer: Tensor) -> Tensor:
        self.transport.receive(peer, route.tag + 1, buffer).wait()
        return buffer
