"""The ranks agree once on a message's spec: the same again is one buffer, a changed one three (header, spec, payload).

shape                  a   a   b   a   a
buffers                3   1   3   3   1
with headers ahead     3   2   4   3   2
"""

from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_hanayo.overlap.link_queue import Work
from lightning_hanayo.pipeline_parallel.p2p import (
    Message,
    MessageKey,
    PointToPointChannel,
    gradient_message,
    unpack_gradients,
)
from lightning_hanayo.pipeline_parallel.pytree import Flattener
from recipes.benchmarks.live_bytes import LiveBytes
from tests.harness.limits import real_seconds
from tests.harness.loopback import Hub, LoopbackTransport

KEY = MessageKey(0, "forward", 0)


class Counting(LoopbackTransport):
    sent = 0

    def send(self, peer: int, tag: int, buffer: torch.Tensor, **_: bool) -> Work:
        self.sent += 1
        with _disable_current_modes():  # its copies are the network's
            return super().send(peer, tag, buffer)


def message(value: object) -> Message:
    flattener = Flattener()
    return Message(flattener.flatten(value), tuple(flattener.tensors))


class Line:
    """Two ranks and what the first one sends to the second."""

    def __init__(self, *, separate_headers: bool = False) -> None:
        hub = Hub(2, timeout=real_seconds(30))
        self.transport = Counting(hub, 0)
        self.ends = tuple(
            PointToPointChannel(one, separate_headers=separate_headers)
            for one in (self.transport, LoopbackTransport(hub, 1))
        )

    def send(self, value: Message, signature: int = 0, key: MessageKey = KEY) -> tuple[Message, int]:
        """What is received, and in how many buffers."""
        before = self.transport.sent
        for end in self.ends:
            end.begin_batch(signature)
        self.ends[0].start_transfers([(key, 1, value)], [])
        self.ends[1].start_transfers([], [(key, 0)])
        arrived = self.ends[1].wait_receive(key)
        self.ends[0].finish()
        return arrived, self.transport.sent - before


@pytest.mark.parametrize(("separate_headers", "expected"), [(False, [3, 1, 3, 3, 1]), (True, [3, 2, 4, 3, 2])])
def test_only_a_changed_message_is_sent_with_its_spec(separate_headers: bool, expected: list[int]) -> None:
    """With headers ahead (for GPUs) the agreed buffer is sent the first time, so that its receive ends, and ignored."""
    line, counts = Line(separate_headers=separate_headers), []
    for shape in ((2, 3), (2, 3), (5,), (2, 3), (2, 3)):
        value = torch.randn(shape)
        arrived, count = line.send(message({"h": value, "causal": True}))
        assert torch.equal(arrived.tensors[0], value)
        counts.append(count)
    assert counts == expected


@pytest.mark.parametrize("separate_headers", [False, True])
def test_the_bytes_of_buffers(separate_headers: bool) -> None:
    """Messages of two sizes, forward and backward, to one rank; from the third batch on their number is steady."""
    line, live = Line(separate_headers=separate_headers), LiveBytes()
    sizes = {"forward": 4096, "backward": 1024}
    order = ["forward"] * 3 + ["backward", "forward", "backward", "backward"]
    for _ in range(5):
        for end in line.ends:
            end.begin_batch(0)
        most = 0
        for number, direction in enumerate(order):
            key = MessageKey(0, direction, number)  # type: ignore[arg-type]
            with live.counting():
                line.ends[0].start_transfers([(key, 1, message(torch.ones(sizes[direction] // 4)))], [])
            most = max(most, live.num_bytes)
            line.ends[1].start_transfers([], [(key, 0)])
            line.ends[1].wait_receive(key)
    # two large ones on their way; on the CPU two small ones wait to be used again
    expected = 2 * 4096 if separate_headers else 2 * 4096 + 2 * 1024
    assert most == pytest.approx(expected, rel=0.1)  # headers and specs are buffers, too


def test_each_signature_has_its_own_specs() -> None:
    line = Line()
    assert [line.send(message(torch.ones(s)), signature=s)[1] for s in (1, 2, 1, 2, 1)] == [3, 3, 1, 1, 1]


@pytest.mark.parametrize(("first", "second"), [(True, 1), (1, 1.0), (None, False), ((1,), [1]), (0.0, -0.0)])
def test_plain_values_are_part_of_the_spec(first: object, second: object) -> None:
    line = Line()
    line.send(message(first))
    arrived, count = line.send(message(second))
    assert (arrived.skeleton, count) == (message(second).skeleton, 3)


def test_requires_grad_is_part_of_the_spec() -> None:
    line = Line()
    for wanted in (True, True, False):
        arrived, _ = line.send(message(torch.ones(2, requires_grad=wanted)))
        assert [t.requires_grad for t in arrived.tensors] == [wanted]
        assert len(arrived.differentiable) == wanted


def test_missing_gradients_are_sent() -> None:
    line, key = Line(), MessageKey(0, "backward", 0)
    arrived, _ = line.send(gradient_message([None, torch.ones(2), None]), key=key)
    assert [g is None for g in unpack_gradients(arrived)] == [True, False, True]


def test_tags_differ_for_all_messages_of_a_batch() -> None:
    keys = [MessageKey(s, d, m) for s in range(9) for d in ("forward", "backward") for m in range(9)]
    tags = [tag for key in keys for tag in (key.tag, key.tag + 1)]
    assert len(set(tags)) == len(tags) and not {0, 1} & set(tags)  # 0 and 1 are the relay's and the checkpoint's


def test_a_missing_message_times_out() -> None:
    end = PointToPointChannel(LoopbackTransport(Hub(2, timeout=0.01), 1))
    end.start_transfers([], [(KEY, 0)])
    with pytest.raises(TimeoutError, match="nothing was received from pipeline rank 0"):
        end.wait_receive(KEY)


class Slow(LoopbackTransport):
    """Its messages are sent when they are waited for."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub, 0)
        self.on_their_way: list[tuple[int, int]] = []

    def send(self, peer: int, tag: int, buffer: torch.Tensor, **_: bool) -> Work:
        self.on_their_way.append((peer, tag))
        work = Mock()
        work.wait.side_effect = lambda: self.on_their_way.remove((peer, tag))
        return work


def test_two_messages_are_on_their_way_to_each_rank() -> None:
    """Also from one batch to the next: the end of a batch waits for none. Specs and changed messages end late."""
    transport = Slow(Hub(3))
    channel = PointToPointChannel(transport)
    keys = {peer: [MessageKey(peer, "forward", m) for m in range(4)] for peer in (1, 2)}
    for number in range(4):
        channel.begin_batch(number // 3)
        channel.start_transfers([(keys[peer][number], peer, message(None)) for peer in keys], [])
        headers = [(peer, tag) for peer, tag in transport.on_their_way if tag % 2 == 0]
        assert headers == [(peer, keys[peer][m].tag) for m in (number - 1, number) if m >= 0 for peer in keys]
    channel.finish()
    assert not transport.on_their_way


def test_late_parts_are_waited_for_a_batch_later() -> None:
    transport = Slow(Hub(2))
    channel, keys = PointToPointChannel(transport), [MessageKey(0, "forward", m) for m in range(3)]
    for number, key in enumerate(keys):
        channel.begin_batch(number)
        late = [tag for _, tag in transport.on_their_way if tag % 2]
        assert set(late) == ({keys[number - 1].tag + 1} if number else set())
        channel.start_transfers([(key, 1, message(None))], [])
