"""The transport: moves flat buffers from one pipeline rank to another. Also the relay, over a transport.

`ProcessGroupTransport` uses gloo and NCCL. In tests all ranks may be threads of one process, without a network.

The relay sends a plain value from pipeline rank 0 to rank 1, from there to rank 2, and so on. No rank waits back.

rank 0 --value--> rank 1 --value--> rank 2 --value--> ...      frame | length, 8 B | JSON, up to 1,016 B |  (+ the rest)

Every message names its kind. A rank that receives another kind than it expects raises an error that names both.
"""

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.monitor.waiting import Waiting
from lightning_hanayo.overlap.link_queue import Work


class Transport(ABC):
    """Point-to-point transfers among the ranks of one pipeline.

    Only `Work.wait` blocks. Buffers from one rank to another keep their order. Sender and receiver use the same tag,
    and buffers of the same size.
    """

    rank: int
    num_ranks: int
    device: torch.device
    has_channels: bool = False
    """whether messages have channels of their own, and not those for buffers in host memory"""

    @abstractmethod
    def send(self, peer: int, tag: int, buffer: Tensor, *, on_host: bool = False) -> Work:
        """Start to send `buffer` to pipeline rank `peer`; `on_host`: past the messages' own channels."""

    @abstractmethod
    def receive(self, peer: int, tag: int, buffer: Tensor, *, on_host: bool = False) -> Work:
        """Start to fill `buffer` from pipeline rank `peer`; `on_host` as for `send`."""

    @abstractmethod
    def close(self) -> None:
        """Drop the references to the connections, after a failure: they close, and waiting peers get an error."""


OnFailure = Callable[[Exception], NoReturn]
"""Called with the error of a transfer; raises one that names the rank that failed first."""


class Transfer(NamedTuple):
    """Tells a transfer from all others between two ranks."""

    peer: int
    """rank of the world"""
    tag: int
    sends: bool
    num_ranks: int
    """of the transport, which tells transports between the same two ranks apart"""
    number: int
    """of the transfers to or from that peer with this tag, from 1 on"""


class ReportingWork(Waiting):
    """A transfer whose errors go to `on_failure`. It states the wait for itself, inside that for its message."""

    __slots__ = ("on_failure", "work")

    def __init__(self, work: dist.Work, on_failure: OnFailure, transfer: Transfer) -> None:
        self.what, self.whom = None, transfer
        self.work, self.on_failure = work, on_failure

    def wait(self) -> None:
        """Block until the buffer is sent, or filled."""
        try:
            with self:
                self.work.wait()
        except RuntimeError as error:
            self.on_failure(error)


@dataclass(eq=False, repr=False)
class ProcessGroupTransport(Transport):
    """Transfers among the ranks of one pipeline, over `torch.distributed`.

    NCCL runs the transfers of one communicator in the order in which they were posted. In one communicator for all
    ranks, or for both directions, messages would wait for each other. So on GPUs each ordered pair of ranks has a
    communicator of its own. Where there are no channels, and `on_host`, buffers go over the control group, where tags
    distinguish them.
    """

    ranks: Sequence[int]
    """the global ranks of the pipeline, in pipeline order"""
    _: KW_ONLY
    control: dist.ProcessGroup | None
    """a gloo group over `ranks`; None once it is closed"""
    channels: Mapping[tuple[int, int], dist.ProcessGroup]
    """for messages on `device`, a group of two for each (sender, receiver), by pipeline rank"""
    device: torch.device
    """where the tensors of messages are"""
    on_failure: OnFailure
    """called when a transfer fails"""

    def __post_init__(self) -> None:
        self.rank, self.num_ranks = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.has_channels = bool(self.channels)
        self._latest: dict[tuple[int, int, bool], Transfer] = {}
        """by peer, tag and whether this rank sends"""

    @property
    def started(self) -> list[Transfer]:
        """The latest transfers that were started: one for each peer, tag and direction. For any thread."""
        return list(self._latest.values())

    @override
    def close(self) -> None:
        self.control, self.channels = None, {}

    @override
    def send(self, peer: int, tag: int, buffer: Tensor, *, on_host: bool = False) -> Work:
        return self._post(peer, tag, buffer, sends=True, on_host=on_host)

    @override
    def receive(self, peer: int, tag: int, buffer: Tensor, *, on_host: bool = False) -> Work:
        return self._post(peer, tag, buffer, sends=False, on_host=on_host)

    def _post(self, peer: int, tag: int, buffer: Tensor, *, sends: bool, on_host: bool) -> Work:
        try:
            earlier = self._latest.get((peer, tag, sends))
            number = 1 if earlier is None else earlier.number + 1
            transfer = self._latest[peer, tag, sends] = Transfer(self.ranks[peer], tag, sends, self.num_ranks, number)
            assert self.control is not None, "the transport is closed"
            group, group_rank = self.control, peer
            if self.channels and not on_host:  # each ordered pair of ranks has one
                group = self.channels[(self.rank, peer) if sends else (peer, self.rank)]
                group_rank = int(peer > self.rank)
            work = (group.send if sends else group.recv)([buffer], group_rank, tag)
            return ReportingWork(work, self.on_failure, transfer)
        except RuntimeError as error:
            self.on_failure(error)


MessageKind = Literal["batch", "data", "metrics", "norm", "vote", "values", "pass", "random", "parameters"]
MEANINGS: dict[MessageKind, str] = {
    "batch": "how the next batch is cut",
    "data": "whether there is one more batch",
    "metrics": "what was logged",
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
            HanayoError: rank 0 has sent another kind of message.
        """
        if self.transport.num_ranks == 1:
            return value
        if self.transport.rank == 0:
            self._send(json.dumps((kind, value)).encode())
            return value
        with Waiting(MEANINGS[kind], None):
            frame = self._receive_bytes(_FRAME)
            length = int.from_bytes(frame[:8], "little")
            data = frame[8 : 8 + length] + (self._receive_bytes(length - _ROOM) if length > _ROOM else b"")
        if self.transport.rank < self.transport.num_ranks - 1:
            self._send(data)
        got, value = json.loads(data)
        if got != kind:
            raise HanayoError(
                f"pipeline rank {self.transport.rank} waits for a message of the kind {kind!r}, but rank 0 has sent "
                f"one of the kind {got!r}: does a hook run on some ranks only, or do loaders have other lengths?"
            )
        return value

    def finish(self) -> None:
        """Wait until the last value is sent: a rank that receives it late needs this rank's connection."""
        while self._sent:
            self._finish_first()

    def forget(self) -> None:
        """Drop messages under way, after a failure."""
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

    def _receive_bytes(self, num_bytes: int) -> bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self.transport.receive(self.transport.rank - 1, _TAG, buffer).wait()
        return buffer.numpy().tobytes()
