"""The chain: a plain value handed from pipeline rank 0 to rank 1, from there to rank 2, and so on; nobody waits back.

rank 0 --value--> rank 1 --value--> rank 2 --value--> ...      frame | length, 8 B | JSON, up to 504 B |  (+ the rest)
"""

import json
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.runtime.transport import Transport, Work

_FRAME = 512
_ROOM = _FRAME - 8
_TAG = 0


class Chain:
    """Small decisions of rank 0 that all ranks of its pipeline need: micro-batches of a batch, metrics, an end of data.

    Every rank of the pipeline calls `share` equally often.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._leaving: list[tuple[Tensor, Work]] = []

    def share(self, value: Any = None) -> Any:
        """Return rank 0's `value` (anything JSON holds) on every rank; the others' argument counts for nothing."""
        if self.transport.num_ranks == 1:
            return value
        data = json.dumps(value).encode() if self.transport.rank == 0 else self._receive()
        if self.transport.rank < self.transport.num_ranks - 1:
            self._send(data)
        return value if self.transport.rank == 0 else json.loads(data)

    def finish(self) -> None:
        """Wait until the last value has left: a peer that takes it late must still find this rank there."""
        for _, work in self._leaving:
            work.wait()
        self._leaving = []

    def forget(self) -> None:
        """Drop what is under way, after a failure."""
        self._leaving = []

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
