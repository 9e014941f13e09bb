"""The chain: a plain value handed from pipeline rank 0 to rank 1, from there to rank 2, and so on; nobody waits back.

rank 0 --value--> rank 1 --value--> rank 2 --value--> ...      frame | length, 8 B | JSON, up to 504 B |  (+ the rest)

Every message says of which kind it is: ranks that have come apart are found out at once, and told of both kinds.
"""

import json
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.runtime.transport import Transport, Work

Kind = Literal["batch", "data", "metrics", "loss"]
"""how a batch is cut; whether there is one more batch; what was logged; the loss of a batch"""

_FRAME = 512
_ROOM = _FRAME - 8
_TAG = 0


class UnexpectedMessage(HanayoError):
    """Another kind of message came than this rank waits for. The message stays, for the next one to ask for it."""

    def __init__(self, rank: int, expected: Kind, got: Kind) -> None:
        super().__init__(
            f"pipeline rank {rank} waits for a message of the kind {expected!r}, but pipeline rank 0 has sent one of "
            f"the kind {got!r}: the ranks are at different points of the run. A hook or callback that does something "
            f"on some ranks only, or a data loader whose length differs between ranks, leads there."
        )
        self.got = got


class Chain:
    """Small decisions of rank 0 that all ranks of its pipeline need: micro-batches of a batch, metrics, an end of data.

    Every rank of the pipeline calls `share` equally often.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._leaving: list[tuple[Tensor, Work]] = []
        self._held: tuple[Kind, Any] | None = None

    def share(self, kind: Kind, value: Any = None) -> Any:
        """Return rank 0's `value` (anything JSON holds) on every rank; the others' argument counts for nothing.

        Raises:
            UnexpectedMessage: rank 0 has sent another kind of message.
        """
        if self.transport.num_ranks == 1:
            return value
        if self.transport.rank == 0:
            self._send(json.dumps((kind, value)).encode())
            return value
        got, value = self._next()
        if got != kind:
            self._held = got, value
            raise UnexpectedMessage(self.transport.rank, kind, got)
        return value

    def finish(self) -> None:
        """Wait until the last value has left: a peer that takes it late must still find this rank there."""
        for _, work in self._leaving:
            work.wait()
        self._leaving = []

    def forget(self) -> None:
        """Drop what is under way, after a failure."""
        self._leaving = []

    def _next(self) -> tuple[Kind, Any]:
        """The message that comes next; it goes on to the next rank when it arrives."""
        held, self._held = self._held, None
        if held is not None:
            return held
        data = self._receive()
        if self.transport.rank < self.transport.num_ranks - 1:
            self._send(data)
        kind, value = json.loads(data)
        return kind, value

    def _send(self, data: bytes) -> None:
        frame = len(data).to_bytes(8, "little") + data[:_ROOM]
        parts = [frame.ljust(_FRAME, b"\0"), *([data[_ROOM:]] if len(data) > _ROOM else [])]
        buffers = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
        self.finish()  # the share before this one: long gone
        works = [self.transport.send(self.transport.rank + 1, _TAG, buffer) for buffer in buffers]
        self._leaving = list(zip(buffers, works, strict=True))

    def _receive(self) -> bytes:
        frame = self._take(_FRAME)
        length = int.from_bytes(frame[:8], "little")
        return frame[8 : 8 + length] + (self._take(length - _ROOM) if length > _ROOM else b"")

    def _take(self, num_bytes: int) -> bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self.transport.receive(self.transport.rank - 1, _TAG, buffer).wait()
        return buffer.numpy().tobytes()
