"""The mail agrees once on a packet's shape: the same again is one message, another one three (note, spec, payload).

shape      a   a   b   a   a
messages   3   1   3   3   1
"""

from unittest.mock import Mock

import pytest
import torch

from lightning_hanayo.runtime.comm.loopback import Hub, LoopbackTransport
from lightning_hanayo.runtime.comm.message import Message, gradients, spread
from lightning_hanayo.runtime.comm.point_to_point import MessageKey, PointToPointChannel
from lightning_hanayo.runtime.comm.pytree import Flattener
from lightning_hanayo.runtime.comm.transport import Work
from tests.harness.limits import real_seconds

ROUTE = MessageKey(0, "forward", 0)


class Counting(LoopbackTransport):
    sent = 0

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        self.sent += 1
        return super().send(peer, tag, buffer)


def packet(value: object) -> Message:
    flattener = Flattener()
    return Message(flattener.flatten(value), tuple(flattener.tensors))


class Line:
    """Two ranks and what the first one sends to the second."""

    def __init__(self, *, notes_apart: bool = False) -> None:
        hub = Hub(2, timeout=real_seconds(30))
        self.transport = Counting(hub, 0)
        self.ends = tuple(
            PointToPointChannel(one, notes_apart=notes_apart) for one in (self.transport, LoopbackTransport(hub, 1))
        )

    def carry(self, value: Message, signature: int = 0, route: MessageKey = ROUTE) -> tuple[Message, int]:
        """What arrives, and in how many messages."""
        before = self.transport.sent
        for end in self.ends:
            end.begin(signature)
        self.ends[1].exchange([], [(route, 0)])  # posted ahead
        self.ends[0].exchange([(route, 1, value)], [])
        arrived = self.ends[1].collect(route)
        self.ends[0].finish()
        return arrived, self.transport.sent - before


@pytest.mark.parametrize(("notes_apart", "expected"), [(False, [3, 1, 3, 3, 1]), (True, [3, 2, 4, 4, 2])])
def test_only_what_has_changed_travels_with_its_spec(notes_apart: bool, expected: list[int]) -> None:
    """With notes apart (for GPUs) what was agreed still comes, so that its receive ends, and is thrown away."""
    line, counts = Line(notes_apart=notes_apart), []
    for shape in ((2, 3), (2, 3), (5,), (2, 3), (2, 3)):
        value = torch.randn(shape)
        arrived, count = line.carry(packet({"h": value, "causal": True}))
        assert torch.equal(arrived.tensors[0], value)
        counts.append(count)
    assert counts == expected


def test_each_signature_agrees_for_itself() -> None:
    line = Line()
    assert [line.carry(packet(torch.ones(s)), signature=s)[1] for s in (1, 2, 1, 2, 1)] == [3, 3, 1, 1, 1]


@pytest.mark.parametrize(("first", "second"), [(True, 1), (1, 1.0), (None, False), ((1,), [1]), (0.5, 0.25)])
def test_plain_values_are_part_of_the_agreement(first: object, second: object) -> None:
    line = Line()
    line.carry(packet(first))
    arrived, count = line.carry(packet(second))
    assert (arrived.skeleton, count) == (packet(second).skeleton, 3)


def test_whether_a_gradient_is_wanted_is_too() -> None:
    line = Line()
    for wanted in (True, True, False):
        arrived, _ = line.carry(packet(torch.ones(2, requires_grad=wanted)))
        assert [t.requires_grad for t in arrived.tensors] == [wanted]
        assert len(arrived.differentiable) == wanted


def test_missing_gradients_cross() -> None:
    line, route = Line(), MessageKey(0, "backward", 0)
    arrived, _ = line.carry(gradients([None, torch.ones(2), None]), route=route)
    assert [g is None for g in spread(arrived)] == [True, False, True]


def test_tags_differ_for_all_messages_of_a_batch() -> None:
    routes = [MessageKey(s, d, m) for s in range(9) for d in ("forward", "backward") for m in range(9)]
    tags = [tag for route in routes for tag in (route.tag, route.tag + 1)]
    assert len(set(tags)) == len(tags) and not {0, 1} & set(tags)  # 0 and 1 are the chain's and the checkpoint's


def test_nothing_comes() -> None:
    end = PointToPointChannel(LoopbackTransport(Hub(2, timeout=0.01), 1))
    end.exchange([], [(ROUTE, 0)])
    with pytest.raises(TimeoutError, match="nothing came from pipeline rank 0"):
        end.collect(ROUTE)


class Slow(LoopbackTransport):
    """Whose messages leave when they are let go."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub, 0)
        self.waited: list[int] = []

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        work = Mock()
        work.wait.side_effect = lambda: self.waited.append(tag)
        return work


def test_a_batch_ends_before_its_last_messages_have_left() -> None:
    transport = Slow(Hub(2))
    mail, routes = PointToPointChannel(transport), [MessageKey(0, "forward", m) for m in range(3)]
    for batch, route in enumerate(routes):
        mail.begin(batch)
        mail.exchange([(route, 1, packet(None))], [])
        assert set(transport.waited) == {one.tag + i for one in routes[: max(0, batch - 1)] for i in (0, 1)}
    mail.finish()
    assert set(transport.waited) == {one.tag + i for one in routes for i in (0, 1)}
