"""The mail: packets between stages, each in one buffer whose size both sides know before it comes.

Both sides keep, for every message of a batch of a given signature (shapes and kind of step), the spec it had last time.
The receiver posts a buffer of that size ahead of time; when the spec has changed, the sender fills the buffer with a
note, and spec and payload follow on the control group. So nothing is asked and answered, and shapes may change at will.

    agreed:      |header 0| tensors |
    changed:     |header n|  unused |      then   | spec, n bytes |      then   | header | tensors |
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_hanayo.runtime.codec import ALIGN, Spec, header, pack, set_header, spec_of, unpack
from lightning_hanayo.runtime.packet import Packet
from lightning_hanayo.runtime.transport import Post, Transport, Work

_CPU = torch.device("cpu")
REMEMBERED = 64
"""signatures whose specs are kept: shapes of batches met lately"""


@dataclass(frozen=True)
class Route:
    """One message of a batch: over the border behind `stage`, forward (activations) or backward (gradients)."""

    stage: int
    direction: Literal["forward", "backward"]
    microbatch: int

    @property
    def tag(self) -> int:
        """Differs for all messages of a batch; its successor is the correction's."""
        return 2 + 2 * (2 * (self.stage << 16 | self.microbatch) + (self.direction == "backward"))


class Mail:
    """Sends and receives packets over a transport. `begin` each batch, `finish` it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._known: dict[int, dict[Route, Spec]] = {}
        self._agreed: dict[Route, Spec] = {}
        self._arriving: dict[Route, tuple[int, Tensor, Work]] = {}
        self._leaving: dict[Route, list[tuple[Tensor, Work]]] = {}

    def begin(self, signature: int) -> None:
        """Start a batch; the same `signature` on all ranks, which so forget the same ones."""
        self._agreed = self._known.pop(signature, {})
        self._known[signature] = self._agreed
        if len(self._known) > REMEMBERED:
            self._known.pop(next(iter(self._known)))

    def exchange(self, sends: Sequence[tuple[Route, int, Packet]], receives: Sequence[tuple[Route, int]]) -> None:
        """Start one batch of transfers; the `int` is the peer. Blocks for nothing."""
        receiving = [(route, Post("receive", peer, route.tag, self._awaited(route))) for route, peer in receives]
        sending = [(route, post) for route, peer, packet in sends for post in self._outgoing(route, peer, packet)]
        works = self.transport.start([post for _, post in (*receiving, *sending)])
        for (route, post), work in zip((*receiving, *sending), works, strict=True):
            if post.direction == "receive":
                self._arriving[route] = (post.peer, post.buffer, work)
            else:
                self._leaving.setdefault(route, []).append((post.buffer, work))

    def collect(self, route: Route) -> Packet:
        """Wait for the packet of `route`, whose receive was started before."""
        peer, buffer, work = self._arriving.pop(route)
        work.wait()
        length = header(buffer)
        if not length:
            return unpack(self._agreed[route], buffer)
        self._agreed[route] = spec = Spec.from_bytes(bytes(self._correction(route, peer, length).tolist()))
        return unpack(spec, self._correction(route, peer, spec.num_bytes).to(self.transport.device))

    def release(self, routes: Iterable[Route]) -> None:
        """Let go of the buffers of messages that have left; waits until they have."""
        for route in routes:
            for _, work in self._leaving.pop(route, []):
                work.wait()

    def finish(self) -> None:
        """Wait until all that was sent in this batch has left."""
        self.release(list(self._leaving))

    def forget(self) -> None:
        """Drop all that is under way, after a failure."""
        self._arriving.clear()
        self._leaving.clear()

    def _awaited(self, route: Route) -> Tensor:
        agreed = self._agreed.get(route)
        return torch.empty(agreed.num_bytes if agreed else ALIGN, dtype=torch.uint8, device=self.transport.device)

    def _outgoing(self, route: Route, peer: int, packet: Packet) -> list[Post]:
        spec = spec_of(packet)
        if self._agreed.get(route) == spec:
            return [Post("send", peer, route.tag, pack(spec, packet.tensors, self.transport.device))]
        note = self._awaited(route)
        self._agreed[route] = spec
        text = torch.frombuffer(bytearray(spec.to_bytes()), dtype=torch.uint8)
        set_header(note, text.numel())
        payload = pack(spec, packet.tensors, _CPU)
        return [Post("send", peer, tag, buffer) for tag, buffer in
                ((route.tag, note), (route.tag + 1, text), (route.tag + 1, payload))]  # fmt: skip

    def _correction(self, route: Route, peer: int, num_bytes: int) -> Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        (work,) = self.transport.start([Post("receive", peer, route.tag + 1, buffer)])
        work.wait()
        return buffer
