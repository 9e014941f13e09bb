"""Ranks that hold the same parameter compare it every so many steps; a difference names the parameter and the ranks.

step            1     2       3     4
data rank 1           + tiny
compared              |             |      "after optimizer step 4"
"""

import re
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import nn

from lightning_hanayo.errors import PeerFailed, ReplicasDifferError
from lightning_hanayo.strategy.votes import first_difference
from lightning_hanayo.versions import hashes_of
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, data_rank, make_loader, make_strategy, make_trainer, unguarded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_a_hash_sees_each_bit_and_each_place(dtype: torch.dtype) -> None:
    values = torch.arange(1, 200_001).to(dtype) if dtype is not torch.bfloat16 else torch.randn(200_001).to(dtype)
    (first,) = hashes_of([nn.Parameter(values)])
    assert hashes_of([nn.Parameter(values.clone()), values]) == [first, first]
    for place in (0, 65_535, 65_536, 199_999):
        other = values.clone()
        other[place] = other[place] * 1.0078125  # the next number in bf16
        assert hashes_of([other]) != [first]
    swapped = values.clone()
    swapped[[0, 65_536]] = values[[65_536, 0]]
    assert hashes_of([swapped]) != [first]


def test_an_empty_parameter_has_a_hash() -> None:
    assert hashes_of([nn.Parameter(torch.zeros(0, 3))]) == [0]
    assert hashes_of([]) == []


def test_the_first_difference_is_told_with_the_ranks_of_each_hash() -> None:
    alike, other = {("a", ""): 1, ("b", ""): 2}, {("a", ""): 1, ("b", ""): 3}
    assert first_difference([(0, alike), (2, alike)]) is None
    assert first_difference([(0, alike), (2, other), (4, alike)]) == ("b", {2: [0, 4], 3: [2]})
    assert first_difference([(0, {("a", "rows 0"): 1}), (1, {("a", "rows 1"): 2})]) is None


class Changes(Callback):
    """Adds to one element of a parameter of one rank, after the second step."""

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            with unguarded(trainer), torch.no_grad():
                pl_module.get_parameter(self.name).view(-1)[:1] += 1e-3


def train(layout: Layout, name: str, rank: int) -> str:
    """The error on this rank."""
    strategy = make_strategy(layout, check_replicas=2)
    trainer = make_trainer(layout, strategy=strategy, max_steps=5, callbacks=[Changes(name, rank)])
    batches = [{k: v[data_rank(layout) :: layout.data] for k, v in b.items()} for b in models.vectors((8,) * 5)]
    try:
        trainer.fit(models.build(models.MLP), make_loader(batches))
    except (ReplicasDifferError, PeerFailed) as error:
        return str(error)
    return ""


CASES: dict[str, tuple[Layout, int, str, str]] = {
    "data": (Layout(2, 1, data=2), 3, "blocks.3.up.weight", r"\(stage 1\) differ.* on rank 1 \(.*; .* on rank 3 \("),
    "cube": (Layout(1, 1, cube=(1, 2, 1)), 1, "blocks.2.up.bias", r"differ.* on rank 0 \(.*; .* on rank 1 \("),
    "alike": (Layout(2, 1, data=2), -1, "blocks.3.up.weight", ""),
}


@pytest.mark.parametrize("name", covered(CASES, by={"data"}))
def test_a_rank_that_has_diverged_is_named(pool: Pool, name: str) -> None:
    layout, rank, parameter, said = CASES[name]
    errors = pool.run(layout.world_size, train, layout, parameter, rank)
    if name == "alike":
        assert errors == [""] * layout.world_size
        return
    for error in errors:
        assert f"after optimizer step 2 the copies of {parameter}" in error
        assert re.search(said, error), error
