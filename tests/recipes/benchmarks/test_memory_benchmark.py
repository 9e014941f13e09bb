"""The memory benchmark: bytes on paper follow from the sizes; and a layout is measured, with its plan."""

import json
from pathlib import Path

import pytest
import torch

from lightning_hanayo.planner.candidates import ONE_RANK, Candidate
from recipes.benchmarks import memory
from recipes.benchmarks.memory_peers import State, Task, best, ours, peers
from recipes.h100.models import Llama

SMALL = Llama("small", 8, 32, 64, 4, 4, 64, 32)
TASK = Task(SMALL, 8, torch.float32, State(4, 4, 8))


def test_the_other_systems_divide_what_they_say() -> None:
    ddp, fsdp, tensor, pipeline = peers(TASK, 4)
    state = 16 * SMALL.parameters
    assert (ddp.state, fsdp.state, tensor.state) == (state, 0.75 * state / 4, state / 4)
    assert pipeline.state == 16 * (2 * SMALL.block_parameters + SMALL.outside_parameters / 2)
    assert fsdp.batch - ddp.batch == 4 * SMALL.outside_parameters
    kept = SMALL.num_blocks * TASK.block().kept
    assert kept / 4 < tensor.batch < kept
    assert pipeline.batch == pytest.approx(kept, rel=0.2)  # four micro-batches in a quarter of the blocks


def test_ours_on_one_pipeline_rank_has_what_one_process_has() -> None:
    """8 micro-batches of one sequence, one after the other: the blocks of one, head and loss, and all parameters."""
    held = ours(TASK, Candidate(num_microbatches=8, schedule=ONE_RANK))
    one = SMALL.num_blocks * TASK.block().kept + TASK.outside().kept
    assert held.state == pytest.approx(16 * SMALL.parameters, rel=0.01)  # norms, too
    assert one < held.batch < 1.5 * one


def test_the_best_layout_of_each_number_of_pipeline_ranks() -> None:
    found = best(TASK, 4)
    plain = [held.layout[:3] for held in found if "embedding and head sharded" not in held.layout]
    assert plain == ["P=1", "P=2", "P=4"]
    for held in found:
        if "embedding and head sharded" in held.layout:
            assert held.total < next(other.total for other in found if other.layout[:3] == held.layout[:3])


@pytest.mark.thorough
def test_a_layout_is_measured(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "memory.json"), "--table", str(tmp_path / "memory.md")]
    small = ["--width", "32", "--context", "64"]
    assert memory.main(["--models", "gpt", "--layouts", "1", "--no-peers", *small, *files]) == 0
    (case,) = json.loads((tmp_path / "memory.json").read_text())["cases"]
    assert max(case["planned"]) == pytest.approx(max(case["measured"]), rel=0.05)
    assert "| gpt | P=2 x W=1, D=1, B=4 of 4, hanayo |" in (tmp_path / "memory.md").read_text()
