"""Lightning splits an ordinary loader over the data ranks only."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.lightning.loaders import check_sampler
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.training import Layout, Outcome, OutcomeCallback, Training, assert_close, make_trainer, merge

BATCH_SIZE = 4
LAYOUT = Layout(2, 1, 2)


def samples() -> list[Batch]:
    """24 single samples."""
    (whole,) = models.vectors((24,), torch.float64)
    return [{name: value[index] for name, value in whole.items()} for index in range(24)]


def shared() -> list[Batch]:
    """The batches of both data ranks, interleaved as `Training.share` splits them."""
    samplers = [DistributedSampler(range(24), 2, rank, shuffle=True, seed=0) for rank in range(2)]
    drawn = [index for pair in zip(*samplers, strict=True) for index in pair]
    size = 2 * BATCH_SIZE
    return [
        torch.utils.data.default_collate([samples()[index] for index in drawn[start : start + size]])
        for start in range(0, len(drawn), size)
    ]


def fit_samples(layout: Layout, **loading: Any) -> Outcome:
    callback = OutcomeCallback()
    trainer = make_trainer(layout, max_steps=3, callbacks=[callback], use_distributed_sampler=True)
    trainer.fit(models.build(models.MLP, torch.float64), DataLoader(samples(), batch_size=BATCH_SIZE, **loading))  # type: ignore[arg-type]
    return callback.outcome


def test_data_ranks_get_different_samples(pool: Pool) -> None:
    outcome = merge(pool.run(LAYOUT.world_size, fit_samples, LAYOUT), LAYOUT)
    assert_close(outcome.weights, plain(pool, Training(models.MLP, shared, torch.float64, steps=3)).weights, 1e-10)


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(4, 1, 1, "1f1b")], ids=str)
def test_pipeline_ranks_get_the_same_samples(pool: Pool, layout: Layout) -> None:
    (alone,) = pool.run(1, fit_samples, Layout())
    outcome = merge(pool.run(layout.world_size, fit_samples, layout), layout)
    assert_close(outcome.weights, alone.weights, 1e-10)


def test_a_sampler_over_all_processes_is_refused() -> None:
    loader = DataLoader(range(24), sampler=DistributedSampler(range(24), 4, 0))  # type: ignore[arg-type]
    check_sampler(loader, num_data=4, num_ranks=4)
    with pytest.raises(UnsupportedError, match="to 4 ranks, of which 2 read data"):
        check_sampler(loader, num_data=2, num_ranks=4)
