"""Layers keep no copy of a weight from before an optimizer step, and gather no more than two weights ahead.

Fused optimizers write into parameters without raising their version, so that a version can't tell a new value.
"""

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.tensor3d.sharded_weight import PrefetchOrder, ShardedWeight
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.training import Layout, Outcome, Training, assert_bit_equal, assert_close, fit, merge, run
from tests.strategy.odd_models import activation_checkpointed


class Fused(models.MLP):
    """Keeps the last step's loss, and so its graph, in which a weak reference could find old weights."""

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        self.kept = loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, fused=True)


class FusedForgetful(Fused):
    def loss(self, batch: Batch) -> Tensor:
        return models.MLP.loss(self, batch)


@pytest.mark.parametrize("layout", [Layout(2, 1, 1, "hanayo-zb"), Layout(2, 1, 1, "zb-h1")], ids=str)
def test_a_loss_that_is_kept_keeps_no_old_weight_alive(pool: Pool, layout: Layout) -> None:
    batches = partial(models.vectors, (8, 8, 8))
    kept, forgotten = (
        run(pool, Training(model, batches, steps=3, precision="bf16-mixed"), layout)
        for model in (Fused, FusedForgetful)
    )
    assert_bit_equal(kept.weights, forgotten.weights)


class CheckpointedBlock(models.Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class FusedCheckpointed(FusedForgetful):
    """Blocks are recomputed, for which their weights are gathered again."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = CheckpointedBlock


@pytest.mark.parametrize("layout", [Layout(cube=(2, 1, 1)), Layout(2, 1, 1, cube=(2, 1, 1))], ids=str)
def test_no_old_shard_is_used(pool: Pool, layout: Layout) -> None:
    training = Training(FusedCheckpointed, partial(models.vectors, (8, 8, 8)), torch.float64, steps=3)
    assert_close(run(pool, training, layout).weights, plain(pool, training).weights, 1e-9)


def weights_ahead(model: Any, layout: Layout) -> tuple[int, int, Outcome]:
    """The maximum of weights that one stage had gathered ahead, and the number left after the training."""
    after, most = PrefetchOrder.record, 0
    weights: list[ShardedWeight] = []

    def num_ahead() -> int:
        return sum(weight._prefetched is not None for weight in weights)

    def counted(order: PrefetchOrder, weight: ShardedWeight) -> list[ShardedWeight]:
        nonlocal most
        if not weights:  # all are gathered before the first one is used
            weights.extend(other for other in gc.get_objects() if isinstance(other, ShardedWeight))
        most = max(most, num_ahead())
        return after(order, weight)

    PrefetchOrder.record = counted  # type: ignore[method-assign]
    try:
        outcome = fit(Training(model, partial(models.windows, (8, 8)), torch.float64, steps=2), layout)
    finally:
        PrefetchOrder.record = after  # type: ignore[method-assign]
    return most, num_ahead(), outcome


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_gather_no_more_than_two_weights_ahead(pool: Pool, reentrant: bool) -> None:
    model, layout = partial(activation_checkpointed, "gpt2", reentrant), Layout(cube=(2, 1, 1))
    ranks = pool.run(2, weights_ahead, model, layout)
    assert [(most, left) for most, left, _ in ranks] == [(2, 0)] * 2
    plainly = Training(model, partial(models.windows, (8, 8)), torch.float64, steps=2)
    assert_close(merge([outcome for *_, outcome in ranks], layout).weights, plain(pool, plainly).weights, 1e-6)
