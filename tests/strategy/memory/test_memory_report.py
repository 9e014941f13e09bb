"""The predicted peak of each rank is within 5 % of the measured one, on real processes."""

import warnings
from typing import Any

import pytest
import torch

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy.memory.report import MemoryReport
from recipes.gpt.module import GPT
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer

WIDTH, CONTEXT, WORDS, SAMPLES, BLOCKS = 32, 64, 64, 16, 8
WAVE, CUBE = Layout(2, 2, schedule="hanayo-zb"), Layout(cube=(1, 2, 1))
LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [
    (WAVE, {}),
    (CUBE, {"cube_memory": "shards"}),
    (Layout(2, schedule="1f1b", num_microbatches=8), {"recompute": "blocks"}),
    (Layout(data=2), {"shard_optimizer": True}),
]


def report_of(layout: Layout, options: dict[str, Any], steps: int = 3) -> MemoryReport:
    """One rank's part of a run."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")
    strategy = make_strategy(layout, measure_memory=True, **options)
    trainer = make_trainer(layout, max_steps=steps, strategy=strategy)
    torch.manual_seed(1)
    tokens = torch.randint(WORDS, (steps, SAMPLES, CONTEXT + 1))
    batches = [{"input_ids": one[:, :-1], "labels": one[:, 1:]} for one in tokens]
    model = GPT(vocab_size=WORDS, context=CONTEXT, num_layers=BLOCKS, width=WIDTH, num_heads=2)
    trainer.fit(model, make_loader(batches))
    report: MemoryReport = strategy.memory_report()
    return report


@pytest.mark.parametrize(("layout", "options"), covered(LAYOUTS, by=LAYOUTS[:2]), ids=str)
def test_predicted_and_measured_peaks(pool: Pool, layout: Layout, options: dict[str, Any]) -> None:
    reports = pool.run(layout.world_size, report_of, layout, options)
    assert all(report == reports[0] for report in reports)
    assert len(reports[0].ranks) == layout.world_size
    for one in reports[0].ranks:
        assert one.error == pytest.approx(0.0, abs=0.05), reports[0]
        for kind in ("weights", "optimizer", "gathered"):
            assert one.predicted[kind] == one.measured[kind]
        assert one.process > one.measured_peak
    lines = str(reports[0]).splitlines()
    assert lines[0].split()[:4] == ["rank", "MB", "weights", "gradients"]
    assert len(lines) == 1 + 2 * layout.world_size


def nothing_measured(layout: Layout) -> None:
    with pytest.raises(HanayoError, match=r"nothing was measured.*measure_memory=True.*at least 3 batches"):
        report_of(layout, {}, steps=2)
    trainer = make_trainer(layout, max_steps=1)
    trainer.fit(models.build(models.MLP), make_loader(models.vectors((8,))))
    with pytest.raises(HanayoError, match="nothing was measured"):
        trainer.strategy.memory_report()  # type: ignore[attr-defined]


def test_nothing_was_measured(pool: Pool) -> None:
    pool.run(2, nothing_measured, Layout(2))
