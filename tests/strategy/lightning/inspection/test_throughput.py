"""Throughput of a run over real processes: a batch counts once, although several ranks work on it."""

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, make_loader, make_trainer

LAYOUTS = [Layout(2, 1, 1), Layout(2, 1, 2), Layout(cube=(2, 1, 1))]
STEPS, SAMPLES, FLOPS = 4, 8, 1000


def monitored(layout: Layout, folder: str) -> None:
    """One rank's part of a run, whose data ranks each see eight samples per batch."""
    module: Any = models.build(models.MLP)
    module.flops_per_batch = FLOPS
    monitor = ThroughputMonitor(lambda batch: len(batch["x"]), window_size=2)
    options: dict[str, Any] = {"log_every_n_steps": 1, "logger": CSVLogger(folder, name="", version="")}
    make_trainer(layout, max_steps=STEPS, callbacks=[monitor], **options).fit(
        module, make_loader(models.vectors((SAMPLES,) * STEPS))
    )


@pytest.mark.parametrize("layout", covered(LAYOUTS, by=LAYOUTS[1:2]), ids=str)
def test_totals_are_over_data_ranks(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    pool.run(layout.world_size, monitored, layout, str(tmp_path))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    measured = [row for row in rows if row.get("train/samples")]
    last = {name.removeprefix("train/"): float(n) for name, n in measured[-1].items() if n}
    assert last["samples"] == STEPS * SAMPLES
    own = last["device/samples_per_sec"]
    assert last["device/flops_per_sec"] == pytest.approx(own * FLOPS / SAMPLES)
    assert last.get("samples_per_sec", own) == pytest.approx(own * layout.data)
    assert ("samples_per_sec" in last) == (layout.data > 1), "as with as many processes of DDP"
