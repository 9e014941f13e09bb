"""Ranks that are started again with the store of the start before."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from torch.distributed.distributed_c10d import Store

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy import joining
from lightning_hanayo.strategy.joining import _fresh_store, serve_store, store_of_start
from tests.harness.limits import wait_until

TIMEOUT = timedelta(seconds=60)


def start(store: Store, world_size: int) -> list[Store]:
    with ThreadPoolExecutor(world_size) as threads:
        missing = [set(range(1, world_size)), *({0} for _ in range(1, world_size))]
        return list(threads.map(lambda rank: _fresh_store(store, rank, missing[rank], TIMEOUT), range(world_size)))


def test_each_start_finds_nothing_of_the_one_before() -> None:
    store = dist.HashStore()
    for world_size in (3, 3, 2, 4):
        stores = start(store, world_size)
        assert not any(one.check(["address"]) for one in stores)
        stores[-1].set("address", "of this start")
        assert all(one.get("address") == b"of this start" for one in stores)


def test_a_rank_that_does_not_come_is_named() -> None:
    store = dist.HashStore()
    start(store, 2)
    with pytest.raises(HanayoError, match="rank 1 has not joined the run within 0:00:00"):
        _fresh_store(store, 0, {1}, timedelta(0))
    with pytest.raises(HanayoError, match="rank 0 has not joined the run"):
        _fresh_store(dist.HashStore(), 1, {0}, timedelta(milliseconds=1))


def test_a_port_is_taken_before_it_is_told() -> None:
    store = serve_store()
    with pytest.raises(OSError, match="in use"), socket.create_server(("", store.port)):
        pass
    with ThreadPoolExecutor(2) as threads:
        join = partial(store_of_start, "127.0.0.1", store.port, world_size=2, timeout=TIMEOUT, environment={})
        joined = list(threads.map(lambda rank: join(rank=rank), range(2)))
    joined[0].set("key", "value")
    assert joined[1].get("key") == b"value"


def test_a_rank_alone_finds_the_store_of_its_agent() -> None:
    """As under torchrun --nproc-per-node=1."""
    agents = serve_store()
    store = store_of_start("127.0.0.1", agents.port, 0, 1, TIMEOUT, {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    store.set("a", "b")
    assert store.get("a") == b"b"


def test_a_port_that_another_program_has_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HanayoError, match=f"another program has port {port}.* set MASTER_PORT to another port"):
            store_of_start("127.0.0.1", port, 0, 2, TIMEOUT, {})
        alone = store_of_start("127.0.0.1", port, 0, 1, TIMEOUT, {})
    assert not alone.check(["key"])


def test_ranks_that_are_late_are_named_while_the_others_wait(capfd: pytest.CaptureFixture[str]) -> None:
    port = find_free_network_port()

    def join(rank: int) -> Store:
        return store_of_start("127.0.0.1", port, rank, 4, TIMEOUT, {})

    texts: list[str] = []

    def says(text: str) -> bool:
        texts.append(capfd.readouterr().err)
        return text in "".join(texts)

    with patch.multiple(joining, FIRST=0.2, AGAIN=0.2), ThreadPoolExecutor(4) as threads:
        joined = [threads.submit(join, 1)]
        assert wait_until(lambda: says("rank 0 has not joined the run for "), 30.0)
        joined.append(threads.submit(join, 0))
        assert wait_until(lambda: says("ranks 2 and 3 have not joined the run for "), 30.0)
        joined += [threads.submit(join, rank) for rank in (2, 3)]
        joined[0].result().set("key", "value")
        assert {one.result().get("key") for one in joined} == {b"value"}
