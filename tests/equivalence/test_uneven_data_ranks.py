"""If data ranks have different numbers of micro-batches, each stage's gradients are still all-reduced with its own.

data rank 0   4 samples   0F0 0F1 0F2 0F3 ...     reduces stage 3, then stage 0
data rank 1   1 sample    0F0 ...                 the same order, whichever stage is done first
"""

import pytest
import torch
from torch import Tensor

from lightning_hanayo.schedule import CostModel
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    OutcomeCallback,
    assert_bit_equal,
    assert_close,
    make_loader,
    make_strategy,
    make_trainer,
    merge_owned,
)

LAYOUT = Layout(pipe=2, waves=1, data=2, schedule="hanayo-zb")
COSTS = CostModel(
    forward=(1.5, 1.5, 1, 1.5), backward_input=(2, 1.5, 1.5, 1.5), backward_weight=(1.5, 1.5, 2, 1), message=0.05
)
"""their stages end in a different order with one micro-batch than with four"""
SIZES = {0: 4, 1: 1}


class FourBlocks(models.MLP):
    """One block per stage: the stages' gradients have equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:4]


def batch_of(data_rank: int) -> Batch:
    (whole,) = models.vectors((sum(SIZES.values()),), torch.float64)
    start = sum(SIZES[rank] for rank in range(data_rank))
    return {name: value[start : start + SIZES[data_rank]] for name, value in whole.items()}


def fit(schedule: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's gradients and weights after one step."""
    callback = OutcomeCallback()
    options = {"costs": COSTS} if schedule == "hanayo-zb" else {}
    layout = Layout(LAYOUT.pipe, LAYOUT.waves, LAYOUT.data, schedule)
    trainer = make_trainer(layout, strategy=make_strategy(layout, **options), max_steps=1, callbacks=[callback])
    data_rank = trainer.strategy.data_rank  # type: ignore[attr-defined]
    trainer.fit(models.build(FourBlocks, torch.float64), make_loader([batch_of(data_rank)]))
    return callback.outcome.gradients, callback.outcome.weights


def expected() -> dict[str, Tensor]:
    """The mean of both data ranks' gradients, as in DDP."""
    module = models.build(FourBlocks, torch.float64)
    sum((module.loss(batch_of(rank)) for rank in SIZES), torch.zeros(())).div(len(SIZES)).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    "schedule", covered(["hanayo-zb", "hanayo", "interleaved-zb"], by=["hanayo-zb", "interleaved-zb"])
)
def test_gradients_are_the_sum_over_data_ranks(pool: Pool, schedule: str) -> None:
    ranks = pool.run(LAYOUT.world_size, fit, schedule)
    replicas = [merge_owned([ranks[rank][0] for rank in group]) for group in LAYOUT.topology.groups("pipe")]
    assert_close(replicas[0], expected(), 1e-10)
    assert_bit_equal(replicas[1], replicas[0])
