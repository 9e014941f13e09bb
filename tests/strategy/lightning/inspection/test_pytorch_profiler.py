"""What torch's profiler writes of a run over real processes: stages, micro-batches, and blocks."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.profilers import PyTorchProfiler

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout, make_loader, make_trainer

WAVE = Layout(2, 1, 1, num_microbatches=2)
STEPS = 5  # of which Lightning's default schedule records the last three
RECORDED = 3


def profiled(layout: Layout, folder: str, **options: Any) -> None:
    """One rank's part of a run."""
    profiler = PyTorchProfiler(folder, "trace", **options)
    trainer = make_trainer(layout, max_steps=STEPS, profiler=profiler, default_root_dir=folder)
    trainer.fit(models.build(models.MLP), make_loader(models.vectors((8,) * STEPS)))


def names_in(path: Path) -> Counter[str]:
    """How often each range is in a trace, without the class of modules."""
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"].split(": ")[-1] for event in events if event.get("cat") == "user_annotation")


def traces(folder: Path) -> list[Counter[str]]:
    return [names_in(path) for path in sorted(folder.glob("*.json"))]


def test_each_rank_writes_its_stages_and_modules(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, profiled, WAVE, str(tmp_path))
    first, second = traces(tmp_path)
    actions = [f"{kind} stage {{}} micro-batch {m}" for kind in "FB" for m in (0, 1)]
    for trace, stages in ((first, (0, 3)), (second, (1, 2))):
        assert {name: n for name, n in trace.items() if "micro-batch" in name} == {
            action.format(stage): RECORDED for action in actions for stage in stages
        }
    per_microbatch = 2 * RECORDED
    blocks = {f"blocks.{i}" for i in range(models.NUM_BLOCKS)}
    assert {name: n for name, n in first.items() if name in blocks} == dict.fromkeys(
        ("blocks.6", "blocks.7"), per_microbatch
    ), "the first stage's blocks run in the threads of the steps, which torch's profiler doesn't record"
    assert {name: n for name, n in second.items() if name in blocks} == dict.fromkeys(
        ("blocks.2", "blocks.3", "blocks.4", "blocks.5"), per_microbatch
    )
    assert first["[pl][profile][Strategy]HanayoStrategy.training_step"] == RECORDED


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(cube=(2, 1, 1)), Layout(2, 2, 1, "hanayo-zb")], ids=str)
@pytest.mark.parametrize("options", [{"profile_memory": True}, {"record_module_names": False, "with_stack": True}])
def test_other_layouts_and_options(pool: Pool, tmp_path: Path, layout: Layout, options: dict[str, Any]) -> None:
    pool.run(layout.world_size, profiled_with, layout, str(tmp_path), options)
    assert len(traces(tmp_path)) == layout.world_size
    for trace in traces(tmp_path):
        assert sum("F stage" in name for name in trace.elements()) >= RECORDED


def profiled_with(layout: Layout, folder: str, options: dict[str, Any]) -> None:
    profiled(layout, folder, **options)
