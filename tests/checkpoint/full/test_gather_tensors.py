"""Dictionaries of all ranks are gathered on rank 0, bit for bit."""

from threading import Thread
from typing import Any

import torch

from lightning_hanayo.dist_checkpointing.plain_file import gather
from tests.harness.limits import real_seconds
from tests.harness.loopback import Hub


def gathered(trees: list[Any]) -> list[Any]:
    """The result on each rank."""
    results: list[Any] = [None] * len(trees)
    transports = Hub(len(trees), timeout=real_seconds(30)).transports()

    def call(rank: int) -> None:
        results[rank] = gather(transports[rank], {rank: trees[rank]})

    threads = [Thread(target=call, args=(rank,)) for rank in range(len(trees))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def state(rank: int) -> dict[Any, Any]:
    return {
        f"weight{rank}": torch.full((2, 3), float(rank), dtype=torch.bfloat16).t(),
        7: {"step": torch.tensor(float(rank)), "amsgrad": False, "betas": (0.9, 0.99), "none": None},
        "empty": torch.empty(0, 3),
        "flag": torch.tensor([True, False]),
        "complex": torch.polar(torch.ones(2), torch.ones(2)),
        "learned": torch.ones(2, requires_grad=True),
    }


def test_rank_0_gets_every_ranks_tree() -> None:
    whole, *others = gathered([state(rank) for rank in range(3)])
    assert others == [None, None]
    for rank, tree in whole.items():
        expected = state(rank)
        assert list(tree) == list(expected) and tree[7] | {"step": 0} == expected[7] | {"step": 0}
        assert tree[7]["step"].item() == rank
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(tree[name], value) and tree[name].dtype == value.dtype
                assert not tree[name].requires_grad


def test_empty_trees_and_one_rank() -> None:
    assert gathered([{}, {}])[0] == {0: {}, 1: {}}
    assert gathered([{"a": 1}]) == [{0: {"a": 1}}]
    transports = Hub(1, timeout=1).transports()
    assert gather(transports[0], {}) == {}


def test_a_view_is_sent_without_the_rest_of_its_memory() -> None:
    rows = torch.ones(1000, 10)[:2]
    whole, _ = gathered([None, {"rows": rows}])
    assert whole[1]["rows"].untyped_storage().nbytes() == rows.nbytes
