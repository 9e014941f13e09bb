"""The predicted peak of each rank is within 5 % of the measured one, on real processes."""

import warnings
from typing import Any

import pytest
import torch

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.schedule import build, simulate
from lightning_hanayo.strategy.memory import MemoryReport
from recipes.gpt.module import GPT
from tests.habits.passes import ChosenAndRejected
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer

WIDTH, CONTEXT, WORDS, SAMPLES, BLOCKS = 32, 64, 64, 16, 8
WAVE, CUBE = Layout(2, 2, schedule="hanayo-zb"), Layout(cube=(1, 2, 1))
LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [
    (WAVE, {}),
    (CUBE, {"cube_memory": "shards"}),
    (Layout(cube=(2, 1, 1), weights="batch"), {}),
    (Layout(2, schedule="1f1b", num_microbatches=8), {"recompute": "blocks"}),
    (Layout(data=2), {"shard_optimizer": True}),
    (Layout(2), {"precision": "bf16-true", "master_weights": "fp32"}),
]


def report_of(layout: Layout, options: dict[str, Any], steps: int = 3, samples: int = SAMPLES) -> MemoryReport:
    """One rank's part of a run."""
    of_trainer = {"precision": options.get("precision", "32-true"), "val_check_interval": steps}
    of_strategy = {name: value for name, value in options.items() if name != "precision"}
    strategy = make_strategy(layout, measure_memory=True, **of_strategy)
    trainer = make_trainer(layout, max_steps=steps, strategy=strategy, **of_trainer)
    torch.manual_seed(1)
    tokens = torch.randint(WORDS, (steps, samples, CONTEXT + 1))
    batches = [{"input_ids": one[:, :-1], "labels": one[:, 1:]} for one in tokens]
    model = GPT(vocab_size=WORDS, context=CONTEXT, num_layers=BLOCKS, width=WIDTH, num_heads=2)
    trainer.fit(model, make_loader(batches), make_loader(batches[:1]))  # a validation follows, which isn't measured
    report: MemoryReport = strategy.memory_report()
    return report


@pytest.mark.parametrize(("layout", "options"), covered(LAYOUTS, by=LAYOUTS[:1]), ids=str)
def test_predicted_and_measured_peaks(pool: Pool, layout: Layout, options: dict[str, Any]) -> None:
    reports = pool.run(layout.world_size, report_of, layout, options)
    assert all(report == reports[0] for report in reports)
    assert len(reports[0].ranks) == layout.world_size
    for one in reports[0].ranks:
        # Gradients of kept weights are there when the last backward has made them, not from the first one on.
        assert one.error == pytest.approx(0.0, abs=0.05 if layout.weights == "microbatch" else 0.06), reports[0]
        assert one.process > one.measured_peak
    lines = str(reports[0]).splitlines()
    assert lines[0].split()[:3] == ["MB", "weights", "gradients"]
    assert len(lines) == 1 + layout.world_size


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["hanayo", "hanayo-zb"])
def test_more_micro_batches_are_predicted(pool: Pool, schedule: str) -> None:
    """From a run with four of the same size; what isn't in the model is small here."""
    few, many = (Layout(2, schedule=schedule, num_microbatches=number) for number in (4, 12))
    model = pool.run(2, report_of, few, {})[0].model
    measured = pool.run(2, report_of, many, {}, 3, 3 * SAMPLES)[0]
    peaks = model.peaks(simulate(build(schedule, num_ranks=2, num_microbatches=12)))
    for peak, one in zip(peaks, measured.ranks, strict=True):
        assert peak.total == pytest.approx(one.measured_peak, rel=0.05), measured


def nothing_measured(layout: Layout) -> None:
    with pytest.raises(HanayoError, match=r"nothing was measured.*measure_memory=True.*at least 3 batches"):
        report_of(layout, {}, steps=2)
    trainer = make_trainer(layout, max_steps=1)
    trainer.fit(models.build(models.MLP), make_loader(models.vectors((8,))))
    with pytest.raises(HanayoError, match="nothing was measured"):
        trainer.strategy.memory_report()  # type: ignore[attr-defined]


def several_passes(layout: Layout) -> None:
    warnings.filterwarnings("ignore", message="the step makes")
    strategy = make_strategy(layout, measure_memory=True)
    trainer = make_trainer(layout, max_steps=3, strategy=strategy)
    trainer.fit(models.build(ChosenAndRejected), make_loader(models.vectors((8, 8, 8))))
    with pytest.raises(UnsupportedError, match="memory_report predicts steps with one pass"):
        strategy.memory_report()


def test_several_passes_are_refused(pool: Pool) -> None:
    pool.run(2, several_passes, Layout(2))


def test_nothing_was_measured(pool: Pool) -> None:
    pool.run(2, nothing_measured, Layout(2))
