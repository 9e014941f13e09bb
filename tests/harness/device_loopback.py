"""A loopback transport whose transfers run beside the ranks' own work, as those of NCCL do. All ranks are threads.

    rank 0, host      F0   send     F1                      post     B0 .. wait
    rank 0, stream    |-- F0 --|    |-- F1 --|                              |-- B0 --|
    its lane to 1              |-- copy --|                        (waits for the flag) |-- copy --|

A channel is for one direction between two ranks. Each of its two sides works in a lane of its own, a queue of work
that the host doesn't wait for: a CUDA stream, on the CPU a thread. A send copies the buffer into the slot of its
message, and raises the slot's flag; the receive, which may be posted earlier, waits for it on the device. Then the slot
is poisoned.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.overlap.link_queue import Work
from tests.harness.lanes import Lane, StreamLane, ThreadLane
from tests.harness.loopback import Hub, LoopbackTransport

_JITTER_S = 0.0005
_current = threading.local()


@dataclass(frozen=True)
class _Slot:
    """Where a message lies on its way."""

    staging: Tensor
    flag: Any


@dataclass
class Transfer:
    """A transfer under way. As NCCL does, it keeps the buffer until it is waited for."""

    buffer: Tensor | None
    mark: Callable[[], object]

    def wait(self) -> None:
        self.mark()
        self.buffer = None


class _Channel:
    """One direction between two ranks. Each side runs its transfers in the order in which they are posted."""

    def __init__(self, hub: "DeviceHub", seed: int) -> None:
        self._hub, self._random = hub, Random(seed)
        self._lock = threading.Lock()
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._posted: dict[str, Counter[int]] = {"send": Counter(), "receive": Counter()}
        self.out, self.into = hub.new_lane(), hub.new_lane()

    def _slot(self, side: str, tag: int, buffer: Tensor) -> _Slot:
        """The slot of the next message with this tag: made by the side that comes first, dropped by the other."""
        with self._lock:
            key = tag, self._posted[side][tag]
            self._posted[side][tag] += 1
            if key in self._slots:
                return self._slots.pop(key)
            self._slots[key] = slot = self._hub.new_slot(buffer.nbytes)
            return slot

    def send(self, tag: int, buffer: Tensor) -> Work:
        slot, lane = self._slot("send", tag, buffer), self.out
        lane.follow_caller()
        lane.pause(self._random.random() * _JITTER_S)
        lane.run(lambda: slot.staging.copy_(buffer.view(torch.uint8)))
        lane.raise_flag(slot.flag)
        return Transfer(buffer, lane.mark())

    def receive(self, tag: int, buffer: Tensor) -> Work:
        slot, lane = self._slot("receive", tag, buffer), self.into
        assert slot.staging.numel() == buffer.nbytes, f"{slot.staging.numel()} bytes sent, {buffer.nbytes} expected"
        lane.follow_caller()
        lane.await_flag(slot.flag)
        lane.pause(self._random.random() * _JITTER_S)
        lane.run(lambda: buffer.view(torch.uint8).copy_(slot.staging))
        lane.run(lambda: slot.staging.fill_(255))  # not a number, if it is read again
        return Transfer(buffer, lane.mark())


class DeviceHub(Hub):
    """Connects the transports of ranks that are threads on one device."""

    def __init__(self, num_ranks: int, device: str, timeout: float = 30.0) -> None:
        super().__init__(num_ranks, timeout)
        self.device = torch.device(device)
        self._lock = threading.Lock()
        self._maker = torch.cuda.Stream() if self.device.type == "cuda" else None
        self._kept: list[_Slot] = []
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._lanes: list[Lane] = []
        self.own_lanes: defaultdict[int, list[Lane]] = defaultdict(list)
        """by rank: what a synchronization of its device would wait for, if each rank had one"""

    @override
    def transports(self) -> list["LoopbackTransport"]:
        return [DeviceTransport(self, rank) for rank in range(self.num_ranks)]

    def new_lane(self) -> Lane:
        """A lane on the device."""
        lane: Lane = StreamLane() if self.device.type == "cuda" else ThreadLane(self.timeout)
        self._lanes.append(lane)
        return lane

    def new_slot(self, num_bytes: int) -> _Slot:
        """A poisoned slot; on a GPU it is kept, so that its memory isn't used for anything else meanwhile."""
        if self._maker is None:
            return _Slot(torch.full((num_bytes,), 255, dtype=torch.uint8), threading.Event())
        with torch.cuda.stream(self._maker):
            staging = torch.full((num_bytes,), 255, dtype=torch.uint8, device=self.device)
            slot = _Slot(staging, torch.zeros(1, dtype=torch.int32, device=self.device))
        self._maker.synchronize()  # both lanes find it made, and the caller waits for no transfer
        self._kept.append(slot)
        return slot

    def channel(self, sender: int, receiver: int) -> _Channel:
        """The channel of an ordered pair."""
        with self._lock:
            if (sender, receiver) not in self._channels:
                new = self._channels[sender, receiver] = _Channel(self, seed=sender * 64 + receiver)
                self.own_lanes[sender].append(new.out)
                self.own_lanes[receiver].append(new.into)
            return self._channels[sender, receiver]

    def synchronize_rank(self) -> None:
        """Let the calling rank's host wait for all that it has posted, as an allocator short of memory does."""
        rank = getattr(_current, "rank", 0)  # user code has threads of its own, on rank 0
        for lane in list(self.own_lanes[rank]):
            lane.host_mark()()

    def close(self) -> None:
        """End all lanes, and free the slots."""
        for lane in self._lanes:
            lane.close()
        if self._maker is not None:
            torch.cuda.synchronize()
        self._kept.clear()


class DeviceTransport(LoopbackTransport):
    """One rank's end. Buffers that are on the CPU while the device isn't go the way of a control group."""

    hub: DeviceHub

    def __init__(self, hub: DeviceHub, rank: int) -> None:
        super().__init__(hub, rank)
        self.device = hub.device
        self._stream = torch.cuda.Stream() if self.device.type == "cuda" else None

    @contextmanager
    @override
    def running(self) -> Iterator[None]:
        _current.rank = self.rank
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    @override
    def send(self, peer: int, tag: int, buffer: Tensor, **_: bool) -> Work:
        if buffer.device.type != self.device.type:
            return super().send(peer, tag, buffer)
        return self.hub.channel(self.rank, peer).send(tag, buffer)

    @override
    def receive(self, peer: int, tag: int, buffer: Tensor, **_: bool) -> Work:
        if buffer.device.type != self.device.type:
            return super().receive(peer, tag, buffer)
        return self.hub.channel(peer, self.rank).receive(tag, buffer)
