"""All ranks stop after the same batch, whatever happens in which order.

           told                 decided: up to batch 8
rank 0     | batch 7             batch 8              | stops
rank 1     |      batch 8                             | stops
rank 2     * batch 7 ........... batch 8              | stops
"""

import random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hanayo.strategy import stopping
from lightning_hanayo.strategy.stopping import AGREE_WITHIN, Decision
from tests.strategy.stopping.simulated import Rank, Threads, Time, World

BATCHES = 30


def simulate(num_ranks: int, told: list[int], after: int, seed: int, frozen: int | None = None) -> World:
    """Train; after so many events the ranks in `told` get a signal, one after another."""
    world = World(num_ranks, BATCHES, random.Random(seed).randrange, frozen=frozen)
    real_threading = stopping.threading
    with (
        patch.object(stopping, "time", Time(world)),
        patch.object(real_threading, "Thread", Threads(world).Thread),
    ):
        for rank in told:
            for _ in range(after):
                world.happen()
            if not world.ranks[rank].is_over:
                world.ranks[rank].stop.tell(15)
        world.run()
    return world


@given(
    num_ranks=st.integers(1, 5),
    told=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    after=st.integers(0, 200),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=200, deadline=None)
def test_all_ranks_stop_after_the_same_batch(num_ranks: int, told: list[int], after: int, seed: int) -> None:
    world = simulate(num_ranks, [rank % num_ranks for rank in told], after, seed)
    assert len({rank.begun for rank in world.ranks}) == 1
    assert all(rank.is_over for rank in world.ranks)
    if world.ranks[0].begun < BATCHES:
        (decision,) = {rank.stopped_by for rank in world.ranks}
        assert decision is not None and decision.last == (world.ranks[0].begun, 0)


@given(
    num_ranks=st.integers(2, 5),
    told=st.integers(0, 4),
    frozen=st.integers(0, 4),
    after=st.integers(0, 50),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=50, deadline=None)
def test_without_an_answer_of_all_there_is_no_agreement(
    num_ranks: int, told: int, frozen: int, after: int, seed: int
) -> None:
    told, frozen = told % num_ranks, frozen % num_ranks
    if told == frozen:
        return
    world = simulate(num_ranks, [told], after, seed, frozen)
    others = [rank for rank in world.ranks if rank.rank != frozen]
    assert all(rank.stop.decision == Decision(15, told, None, (frozen,)) for rank in others)
    assert all(rank.failed_for == frozen for rank in others)
    assert world.now >= AGREE_WITHIN


def alone() -> Rank:
    return World(1, BATCHES, random.Random(0).randrange).ranks[0]


def test_a_single_rank_stops_before_its_next_batch() -> None:
    stop = alone().stop
    assert stop.begin((1, 0)) is None
    stop.tell(2)
    assert stop.begin((2, 0)) == Decision(2, 0, (1, 0))


def test_a_rank_that_waits_ends_with_a_peer_that_fails() -> None:
    class PeerHasFailed(Exception):
        pass

    def check() -> None:
        raise PeerHasFailed

    rank = World(2, BATCHES, random.Random(0).randrange).ranks[0]
    rank.answers["stop/1"](None)
    with patch.object(rank, "check_peers", check), pytest.raises(PeerHasFailed):
        rank.stop.begin((1, 0))


def test_a_rank_begins_nothing_between_a_signal_and_the_news_of_it() -> None:
    """Else a run of few short batches ends before the monitor's thread has looked."""
    news = [
        lambda: stop._on_told(0, 15),
        lambda: rank.receive(0, "verdict", {"topic": stop._topic, "verdict": [15, 0, [3, 0], []]}),
    ]
    rank = alone()
    stop = rank.stop
    assert stop.begin((3, 0)) is None
    stop.expect()
    with patch.object(rank, "check_peers", lambda: news.pop(0)()):
        assert stop.begin((4, 0)) == Decision(15, 0, (3, 0))
