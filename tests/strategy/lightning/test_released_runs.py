"""A run that has ended, and whose Trainer is gone, leaves no connections behind."""

import gc
import os
from pathlib import Path

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout, make_loader, make_trainer

PIPELINE = Layout(2)


def num_connection_threads() -> int:
    """Train; then count gloo's threads, of which each process group has some."""
    make_trainer(PIPELINE, max_steps=1).fit(models.build(models.MLP), make_loader(models.vectors((8,))))
    gc.collect()
    names = (Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task"))
    return sum("gloo" in name for name in names)


def test_runs_one_after_another_have_as_many_connections(pool: Pool) -> None:
    first, second = (pool.run(2, num_connection_threads) for _ in range(2))
    assert first == second
