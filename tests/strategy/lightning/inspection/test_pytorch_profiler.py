"""What torch's profiler writes of a run over real processes: stages, micro-batches, and blocks."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.profilers import PyTorchProfiler
from torch._C._profiler import _ExperimentalConfig

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout, make_loader, make_trainer

WAVE = Layout(2, 1, 1, num_microbatches=2)
STEPS = 5  # of which Lightning's default schedule records the last three
RECORDED = 3
BLOCKS_OF_FIRST = ("blocks.0", "blocks.1", "blocks.6", "blocks.7")
BLOCKS_OF_SECOND = ("blocks.2", "blocks.3", "blocks.4", "blocks.5")


def profiled(layout: Layout, folder: str, **options: Any) -> None:
    """One rank's part of a run."""
    profiler = PyTorchProfiler(folder, "trace", **options)
    trainer = make_trainer(layout, max_steps=STEPS, profiler=profiler, default_root_dir=folder)
    trainer.fit(models.build(models.MLP), make_loader(models.vectors((8,) * STEPS)))


def names_in(path: Path) -> Counter[str]:
    """How often each range is in a trace, without the class of modules."""
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"].split(": ")[-1] for event in events if event.get("cat") == "user_annotation")


def linear_layers_in(path: Path) -> int:
    """How many forwards of linear layers are in a trace, in any thread."""
    return sum(event["name"] == "aten::linear" for event in json.loads(path.read_text())["traceEvents"])


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
    modules = {f"blocks.{i}" for i in range(models.NUM_BLOCKS)} | {"embedding", "head"}
    for trace, own in ((first, ("embedding", *BLOCKS_OF_FIRST, "head")), (second, BLOCKS_OF_SECOND)):
        assert {name: n for name, n in trace.items() if name in modules} == dict.fromkeys(own, per_microbatch)
    counts = [linear_layers_in(path) for path in sorted(tmp_path.glob("*.json"))]
    assert counts == [(2 * 4 + 2) * per_microbatch, 2 * 4 * per_microbatch], "in the threads of the steps, too"
    assert first["[pl][profile][Strategy]HanayoStrategy.training_step"] == RECORDED


def test_what_the_user_has_set_is_kept(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, profiled_by_one_thread, str(tmp_path))
    assert not traces(tmp_path)[0]["embedding"]


def profiled_by_one_thread(folder: str) -> None:
    profiled(WAVE, folder, experimental_config=_ExperimentalConfig())


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
