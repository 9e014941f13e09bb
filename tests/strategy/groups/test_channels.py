"""Channels are made for the pairs of a schedule, and first used in an order in which no rank waits in a circle."""

from collections import deque
from itertools import product

import pytest
import torch
import torch.distributed as dist

from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport
from lightning_hanayo.strategy.groups import Channels, Pair, matchings
from tests.harness.fake_groups import FakeGroups, fake_world


def line(size: int) -> set[Pair]:
    return {(rank, rank + 1) for rank in range(size - 1)}


def ring(size: int) -> set[Pair]:
    return line(size) | {(0, size - 1)} - {(0, 0)}


@pytest.mark.parametrize(
    ("pairs", "num_sets"),
    [*(((line(p)), 1 if p == 2 else 2) for p in range(2, 9)), *((ring(p), 2 + p % 2) for p in range(3, 9))],
)
def test_pairs_without_a_common_rank_are_one_set(pairs: set[Pair], num_sets: int) -> None:
    sets = matchings(pairs)
    assert len(sets) == num_sets
    assert {pair for matching in sets for pair in matching} == pairs
    assert all(len({rank for pair in matching for rank in pair}) == 2 * len(matching) for matching in sets)


class RecordedWork:
    def wait(self) -> None: ...


def first_uses(pairs: set[Pair], num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, Pair]]]:
    """For each rank the order of its first sends and receives, each as what it does and over which channel."""
    uses: list[list[tuple[str, Pair]]] = []
    for rank in range(num_ranks):
        with fake_world(rank, num_ranks), monkeypatch.context() as patch:
            own: list[tuple[str, Pair]] = []
            channels = Channels(FakeGroups(), (tuple(range(num_ranks)),), rank)

            def use(group: dist.ProcessGroup, *, is_sender: bool, own: list[tuple[str, Pair]] = own) -> None:
                low, high = dist.get_process_group_ranks(group)
                sender = dist.get_rank() if is_sender else low + high - dist.get_rank()
                own.append(("send" if is_sender else "receive", (sender, low + high - sender)))

            patch.setattr(channels, "_send_once", use)
            assert set(channels.connect(pairs)) == {
                pair for low, high in pairs for pair in ((low, high), (high, low)) if rank in pair
            }
            uses.append(own)
    return uses


def ends(uses: list[list[tuple[str, Pair]]]) -> bool:
    """Whether all ranks get through if each send and receive blocks until the other rank is there."""
    queues = [deque(own) for own in uses]
    while any(queues):
        heads = [queue[0] if queue else None for queue in queues]
        met = [pair for head in heads if head and head[0] == "send" for pair in [head[1]]
               if heads[pair[1]] == ("receive", pair)]  # fmt: skip
        if not met:
            return False
        for pair in met:
            for rank in pair:
                queues[rank].popleft()
    return True


@pytest.mark.parametrize(("make", "size"), list(product((line, ring), (2, 3, 4, 5, 8))))
def test_first_uses_dont_hang_where_each_blocks(make: object, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: set[Pair] = make(size)  # type: ignore[operator]
    uses = first_uses(pairs, size, monkeypatch)
    assert sum(map(len, uses)) == 4 * len(pairs)  # two directions, each seen from both ends
    assert ends(uses)


def test_hops_between_ranks_that_are_no_neighbours_dont_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(first_uses({(0, 2), (1, 3), (0, 3), (1, 2), (2, 3)}, 4, monkeypatch))


def test_a_circle_is_found() -> None:
    """Each rank sends to the next one first: nobody receives."""
    assert not ends([[("send", (i, (i + 1) % 3)), ("receive", ((i - 1) % 3, i))] for i in range(3)])


def test_a_later_run_makes_only_what_is_missing() -> None:
    with fake_world(1, 4):
        factory = FakeGroups()
        channels = Channels(factory, ((0, 1, 2, 3),), 1)
        before = dict(channels.connect(line(4)))
        made = len(factory.made)
        assert channels.connect({(1, 0), (2, 1)}) == before
        assert len(factory.made) == made
        channels.connect(ring(4))
        assert factory.made[made:] == [("channel", ((0, 3), (1,), (2,)))] * 2


def test_all_pipelines_make_a_pair_at_once() -> None:
    with fake_world(5, 8):
        factory = FakeGroups()
        Channels(factory, ((0, 2), (1, 3), (4, 6), (5, 7)), 5).connect([(0, 1)])
    assert factory.of("channel") == [((0, 2), (1, 3), (4, 6), (5, 7))] * 2


class NoTransfers:
    """A control group that no message may come to, but headers may."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> RecordedWork:
        self.sent += tensors
        return RecordedWork()


def test_messages_go_over_channels_where_there_are_some() -> None:
    with fake_world(1, 3):
        channels = Channels(FakeGroups(), ((0, 1, 2),), 1).connect(line(3))
        control = NoTransfers()

        transport = ProcessGroupTransport(
            range(3),
            control=control,  # type: ignore[arg-type]
            channels=channels,
            device=torch.device("cpu"),
            on_failure=lambda error: pytest.fail(str(error)),
        )
        transport.send(2, 0, torch.ones(1))
        transport.receive(0, 0, torch.ones(1)).wait()
        assert not control.sent
        transport.send(2, 0, torch.ones(1), on_host=True)
        assert len(control.sent) == 1
