"""Buffers between processes over gloo: every rank sends to every other at once, and waits in any order."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hanayo.errors import PeerFailed
from lightning_hanayo.pipeline_parallel.p2p import Message, MessageKey, PointToPointChannel
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport, Relay
from tests.harness.pool import Pool, RunFailed


def connect(on_failure: Any = None) -> ProcessGroupTransport:
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    ranks = range(dist.get_world_size())
    return ProcessGroupTransport(ranks, control=world, channels={}, device=torch.device("cpu"), on_failure=on_failure)


def everybody_to_everybody() -> list[int]:
    transport = connect()
    peers = [rank for rank in range(transport.num_ranks) if rank != transport.rank]
    arriving = {peer: torch.empty(3, dtype=torch.uint8) for peer in peers}
    leaving = {peer: torch.full((3,), 10 * transport.rank + peer, dtype=torch.uint8) for peer in peers}
    works = [transport.receive(peer, 7, arriving[peer]) for peer in peers]
    works += [transport.send(peer, 7, leaving[peer]) for peer in peers]
    for work in reversed(works):
        work.wait()
    return [int(arriving[peer][0]) for peer in peers]


def test_messages_in_both_directions_at_once(pool: Pool) -> None:
    assert pool.run(3, everybody_to_everybody) == [[10, 20], [1, 21], [2, 12]]


def messages() -> list[float]:
    transport = connect()
    channel, relay, got = PointToPointChannel(transport), Relay(transport), []
    other = 1 - transport.rank
    for size in (3, 3, 0, 5, 3):
        channel.begin_batch(0)
        mine, theirs = MessageKey(transport.rank, "forward", 0), MessageKey(other, "forward", 0)
        value = torch.full((size,), float(transport.rank), requires_grad=True)
        channel.start_transfers([(mine, other, Message(("tuple", ("tensor", 0)), (value,)))], [(theirs, other)])
        (arrived,) = channel.wait_receive(theirs).tensors
        assert arrived.shape == (size,) and arrived.requires_grad
        got.append(float(arrived.detach().sum()) + relay.broadcast("norm", 0.5 if transport.rank == 0 else None))
        channel.finish()
    relay.finish()
    return got


def test_messages_both_ways_and_a_relay_between_them(pool: Pool) -> None:
    assert pool.run(2, messages) == [[3.5, 3.5, 0.5, 5.5, 3.5], [0.5] * 5]


def a_peer_leaves() -> None:
    def on_failure(error: Exception) -> None:
        raise PeerFailed(f"said elsewhere: {type(error).__name__}")

    transport = connect(on_failure)
    if transport.rank == 1:
        raise ArithmeticError("leaves")
    transport.receive(1, 7, torch.empty(1, dtype=torch.uint8)).wait()


def test_a_failed_transfer_calls_on_failure(pool: Pool) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(2, a_peer_leaves, timeout=20.0)
    assert [(f.rank, f.kind) for f in caught.value.failures] == [(1, "ArithmeticError"), (0, "PeerFailed")]
