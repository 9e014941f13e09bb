"""The relay: sends a plain value from pipeline rank 0 to rank 1, from there to rank 2, and so on. No rank waits back.

rank 0 --value--> rank 1 --value--> rank 2 --value--> ...      frame | length, 8 B | JSON, up to 1,016 B |  (+ the rest)

Every message names its kind. A rank that receives another kind than it expects raises an error that names both.
"""

import json
from collections import deque
from typing import Any, Literal, Self

import torch
from torch import Tensor

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.monitor.hangs.waiting import Waiting
from lightning_hanayo.runtime.comm.transport import Transport, Work

MessageKind = Literal["batch", "data", "metrics", "loss", "norm", "vote", "values", "pass", "random", "parameters"]
MEANINGS: dict[MessageKind, str] = {
    "batch": "how the next batch is cut",
    "data": "whether there is one more batch",
    "metrics": "what was logged",
    "loss": "the loss of the batch",
    "norm": "that all compute a norm",
    "vote": "a decision of user code",
    "values": "what steps have left for hooks",
    "pass": "the next pass through the stack",
    "random": "the states of random generators",
    "parameters": "that a hook has given the module other parameters",
}

_FRAME = 1024
_ROOM = _FRAME - 8
_TAG = 0
_MAX_UNDER_WAY = 16
"""how many messages a rank may be ahead of the next one: more than a step sends, so no step waits for another's end"""


class UnexpectedMessage(HanayoError):
    """Another kind of message came than this rank waits for."""

    def __init__(self, rank: int, expected: MessageKind, got: MessageKind) -> None:
        super().__init__(
            f"pipeline rank {rank} waits for a message of the kind {expected!r}, but pipeline rank 0 has sent one of "
            f"the kind {got!r}: the ranks are at different points of the run. A hook or callback that does something "
            f"on some ranks only, or a data loader whose length differs between ranks, can cause this."
        )


class Relay:
    """Broadcasts small decisions of pipeline rank 0: how a batch is cut, what was logged, that the data has ended.

    All ranks of the pipeline call `broadcast` equally often.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._sent: deque[list[tuple[Tensor, Work]]] = deque()

    def __deepcopy__(self, memo: object) -> Self:
        """A copy of a Trainer, which a callback may make, has none of its own: the run's connections exist once."""
        return self

    def broadcast(self, kind: MessageKind, value: Any = None) -> Any:
        """Return rank 0's `value`, which JSON can hold, on every rank. The values of the other ranks are ignored.

        Raises:
            UnexpectedMessage: rank 0 has sent another kind of message.
        """
        if self.transport.num_ranks == 1:
            return value
        if self.transport.rank == 0:
            self._send(json.dumps((kind, value)).encode())
            return value
        with Waiting(MEANINGS[kind], None):
            data = self._receive()
        if self.transport.rank < self.transport.num_ranks - 1:
            self._send(data)
        got, value = json.loads(data)
        if got != kind:
            raise UnexpectedMessage(self.transport.rank, kind, got)
        return value

    def finish(self) -> None:
        """Wait until the last value is sent: a rank that receives it late needs this rank's connection."""
        while self._sent:
            self._finish_first()

    def forget(self) -> None:
        """Drop what is under way, after a failure."""
        self._sent.clear()

    def _finish_first(self) -> None:
        for _, work in self._sent.popleft():
            work.wait()

    def _send(self, data: bytes) -> None:
        frame = len(data).to_bytes(8, "little") + data[:_ROOM]
        parts = [frame.ljust(_FRAME, b"\0"), *([data[_ROOM:]] if len(data) > _ROOM else [])]
        buffers = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
        while len(self._sent) >= _MAX_UNDER_WAY:
            self._finish_first()
        works = [self.transport.send(self.transport.rank + 1, _TAG, buffer) for buffer in buffers]
        self._sent.append(list(zip(buffers, works, strict=True)))

    def _receive(self) -> bytes:
        frame = self._receive_bytes(_FRAME)
        length = int.from_bytes(frame[:8], "little")
        return frame[8 : 8 + length] + (self._receive_bytes(length - _ROOM) if length > _ROOM else b"")

    def _receive_bytes(self, num_bytes: int) -> bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self.transport.receive(self.transport.rank - 1, _TAG, buffer).wait()
        return buffer.numpy().tobytes()
