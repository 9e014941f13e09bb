"""The mail: packets between stages, each in one buffer whose size both sides know before it comes.

Both sides keep, for every message of a batch of a given signature (shapes and kind of step), the spec it had last time.
The receiver posts a buffer of that size ahead of time; when the spec has changed, the sender fills the buffer with a
note, and spec and payload follow on the control group. So nothing is asked and answered, and shapes may change at will.

    agreed:      |header 0| tensors |
    changed:     |header n|  unused |      then   | spec, n bytes |      then   | header | tensors |
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_hanayo.runtime.codec import ALIGN, Parcel, Spec, header, set_header, spec_of, unpack
from lightning_hanayo.runtime.packet import Packet
from lightning_hanayo.runtime.transport import Transport, Work

_CPU = torch.device("cpu")
REMEMBERED = 64
"""signatures whose specs are kept: shapes of batches met lately"""
SPARE = 2
"""buffers of one spec that are kept for the next messages: more would be memory that lies idle"""


class Route(NamedTuple):
    """One message of a batch: over the border behind `stage`, forward (activations) or backward (gradients)."""

    stage: int
    direction: Literal["forward", "backward"]
    microbatch: int

    @property
    def tag(self) -> int:
        """Differs for all messages of a batch; its successor is the correction's."""
        return 2 + 2 * (2 * (self.stage << 16 | self.microbatch) + (self.direction == "backward"))


class Arriving(NamedTuple):
    """A message under way to this rank."""

    peer: int
    buffer: Tensor
    work: Work
    packet: Packet | None
    """what `buffer` holds once it is there; None if nothing is agreed yet"""


class Mail:
    """Sends and receives packets over a transport. `begin` each batch, `finish` it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._known: dict[int, dict[Route, Spec]] = {}
        self._agreed: dict[Route, Spec] = {}
        self._arriving: dict[Route, Arriving] = {}
        self._leaving: dict[Route, list[tuple[Parcel | Tensor, Work]]] = {}
        self._parcels: defaultdict[Spec, list[Parcel]] = defaultdict(list)

    def begin(self, signature: int) -> None:
        """Start a batch; the same `signature` on all ranks, which so forget the same ones."""
        self._agreed = self._known.pop(signature, {})
        self._known[signature] = self._agreed
        if len(self._known) > REMEMBERED:
            self._known.pop(next(iter(self._known)))
            self._parcels.clear()

    def exchange(self, sends: Sequence[tuple[Route, int, Packet]], receives: Sequence[tuple[Route, int]]) -> None:
        """Start transfers; the `int` is the peer. Blocks for nothing. Who waits for a message gets it first."""
        transport, agreed = self.transport, self._agreed
        for route, peer, packet in sends:
            spec = agreed.get(route)
            if spec is not None and spec.describes(packet):
                free = self._parcels[spec]
                parcel = free.pop() if free else Parcel(spec, transport.device)
                parcel.fill(packet.tensors)
                self._leaving[route] = [(parcel, transport.send(peer, route.tag, parcel.buffer))]
            else:
                self._leaving[route] = self._change(route, peer, packet)
        for route, peer in receives:
            buffer = self._awaited(route)
            work = transport.receive(peer, route.tag, buffer)
            spec = agreed.get(route)  # unpacked at once: while a message is under way there is time
            self._arriving[route] = Arriving(peer, buffer, work, unpack(spec, buffer) if spec else None)

    def collect(self, route: Route) -> Packet:
        """Wait for the packet of `route`, whose receive was started before."""
        peer, buffer, work, packet = self._arriving.pop(route)
        work.wait()
        length = header(buffer)
        if not length:
            assert packet is not None, "a message that isn't agreed begins with a note"
            return packet
        text = self._correction(route, peer, torch.empty(length, dtype=torch.uint8))
        self._agreed[route] = spec = Spec.from_bytes(text.numpy().tobytes())
        return unpack(spec, self._correction(route, peer, spec.room(_CPU)).to(self.transport.device))

    def release(self, routes: Iterable[Route]) -> None:
        """Let go of the buffers of messages that have left; waits until they have."""
        for route in routes:
            for sent, work in self._leaving.pop(route, ()):
                work.wait()
                if isinstance(sent, Parcel) and len(spare := self._parcels[sent.spec]) < SPARE:
                    spare.append(sent)

    def finish(self) -> None:
        """Wait until all that was sent in this batch has left."""
        self.release(list(self._leaving))

    def forget(self) -> None:
        """Drop all that is under way, after a failure."""
        self._arriving.clear()
        self._leaving.clear()

    def _awaited(self, route: Route) -> Tensor:
        """What comes, or a note that says otherwise: as large as what was agreed."""
        agreed = self._agreed.get(route)
        device = self.transport.device
        return agreed.room(device) if agreed else torch.empty(ALIGN, dtype=torch.uint8, device=device)

    def _change(self, route: Route, peer: int, packet: Packet) -> list[tuple[Parcel | Tensor, Work]]:
        note = self._awaited(route)
        self._agreed[route] = spec = spec_of(packet)
        text = torch.frombuffer(bytearray(spec.to_bytes()), dtype=torch.uint8)
        set_header(note, text.numel())
        payload = Parcel(spec, _CPU)
        payload.fill(packet.tensors)
        posts = [(route.tag, note), (route.tag + 1, text), (route.tag + 1, payload.buffer)]
        return [(buffer, self.transport.send(peer, tag, buffer)) for tag, buffer in posts]

    def _correction(self, route: Route, peer: int, buffer: Tensor) -> Tensor:
        self.transport.receive(peer, route.tag + 1, buffer).wait()
        return buffer
