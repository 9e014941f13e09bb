"""Shapes that change at each batch, over channels that match buffers by their order alone, as NCCL's do.

tags (control group)     header, spec | header, spec | ...          in any order
order (channel)          tensors      | tensors      | ...          what was sent first is received first
"""

import copy
from collections import Counter, defaultdict
from dataclasses import dataclass
from threading import Semaphore
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.overlap.link_queue import Work
from lightning_hanayo.schedule import Schedule, build
from tests.harness.limits import real_seconds
from tests.harness.loopback import Hub, LoopbackTransport
from tests.harness.thorough import covered
from tests.runtime.loopback_pipeline import LoopbackPipeline
from tests.runtime.test_engine import Model, expected


@dataclass(frozen=True)
class _Rendezvous:
    """A send that ends when its receive is posted, as those of gloo and NCCL do."""

    posted: Semaphore
    timeout: float

    def wait(self) -> None:
        assert self.posted.acquire(timeout=self.timeout), "a rank waits for a send that nobody receives"


class InOrder(LoopbackTransport):
    """Tensors go over channels, bytes over a control group, as with a GPU."""

    hub: "InOrderHub"

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self.sent: Counter[str] = Counter()
        self._places: Counter[tuple[str, int]] = Counter()

    @override
    def send(self, peer: int, tag: int, buffer: Tensor, **_: bool) -> Work:
        self.sent["channel" if _is_on_channel(tag, buffer) else "control"] += 1
        tag = self._matched_by("send", peer, tag, buffer)
        super().send(peer, tag, buffer)
        return _Rendezvous(self.hub.posted[self.rank, peer, tag], self.hub.timeout)

    @override
    def receive(self, peer: int, tag: int, buffer: Tensor, **_: bool) -> Work:
        tag = self._matched_by("receive", peer, tag, buffer)
        self.hub.posted[peer, self.rank, tag].release()
        return super().receive(peer, tag, buffer)

    def _matched_by(self, side: str, peer: int, tag: int, buffer: Tensor) -> int:
        """The tag, or on a channel the place in its order, below 0."""
        if not _is_on_channel(tag, buffer):
            return tag
        self._places[side, peer] += 1
        return -self._places[side, peer]


def _is_on_channel(tag: int, buffer: Tensor) -> bool:
    return buffer.dtype is torch.float32 and not tag % 2


class InOrderHub(Hub):
    def __init__(self, num_ranks: int, timeout: float) -> None:
        super().__init__(num_ranks, timeout)
        self.posted: defaultdict[tuple[int, int, int], Semaphore] = defaultdict(lambda: Semaphore(0))

    def transports(self) -> list[LoopbackTransport]:
        return [InOrder(self, rank) for rank in range(self.num_ranks)]


class Running:
    """A model on a pipeline, and a copy in one piece."""

    def __init__(self, schedule: Schedule, *, headers_ahead: bool) -> None:
        torch.manual_seed(0)
        self.model: Any = Model(schedule.num_stages + 1)
        self.reference = copy.deepcopy(self.model)
        self.pipeline = LoopbackPipeline(
            self.model.blocks, schedule, InOrderHub(schedule.num_ranks, real_seconds(30)), headers_ahead=headers_ahead
        )

    def sent(self, length: int, signature: int) -> Counter[str]:
        """How many buffers all ranks send for a batch of that length, whose gradients are those of one process."""
        for transport in self.pipeline.transports:
            transport.sent.clear()
        count = self.pipeline.schedule.num_microbatches
        batch = torch.randint(0, 11, (count, 2, length)).unbind()
        for model in (self.model, self.reference):
            model.zero_grad()
        losses = self.pipeline.run(lambda m: self.model.step(batch[m]), [1 / count] * count, signature=signature)
        assert torch.equal(torch.stack(losses), torch.stack(expected(self.reference, batch)))
        pairs = zip(self.model.parameters(), self.reference.parameters(), strict=True)
        assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)
        return sum((transport.sent for transport in self.pipeline.transports), Counter())


TABLES = [
    build("hanayo", num_ranks=2, num_microbatches=4, num_waves=2),
    build("1f1b", num_ranks=3, num_microbatches=4),
    build("interleaved", num_ranks=2, num_microbatches=4),
]


@pytest.mark.parametrize("schedule", covered(TABLES, by=TABLES[:1]), ids=lambda schedule: schedule.name)
def test_shapes_may_change_at_each_batch(schedule: Schedule) -> None:
    """A message has one buffer on its channel, whatever its shape, except for the first change within a signature."""
    running = Running(schedule, headers_ahead=True)
    try:
        first = running.sent(5, signature=1)
        one = first["channel"]
        assert first["control"] == 2 * one  # header and spec
        assert running.sent(5, signature=1) == {"channel": one, "control": one}
        assert running.sent(7, signature=2) == {"channel": one, "control": 2 * one}
        assert running.sent(6, signature=1) == {"channel": one, "control": 3 * one}  # expected buffers are unused
        for length in (3, 8, 4):
            assert running.sent(length, signature=1) == {"channel": one, "control": 2 * one}
        assert running.sent(4, signature=1) == {"channel": one, "control": one}
    finally:
        running.pipeline.close()


@pytest.mark.parametrize("schedule", covered(TABLES, by=TABLES[:1]), ids=lambda schedule: schedule.name)
def test_no_send_is_waited_for_before_its_receive_is_posted(schedule: Schedule) -> None:
    """With headers in the buffers, the rest of a changed message is received when the message is used."""
    running = Running(schedule, headers_ahead=False)
    try:
        for length in (5, 5, 7, 3, 3):
            running.sent(length, signature=1)
    finally:
        running.pipeline.close()
