"""The benchmark of one GPU at toy sizes on the CPU: every part runs, and JSON, table, picture and bars are made.

tiny models, one round: the program, not time
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from lightning_hanayo.planner import candidates
from lightning_hanayo.planner.estimates import StepModel
from lightning_hanayo.planner.machine import machine
from lightning_hanayo.strategy.model_facts import read_model
from recipes.benchmarks.gpu import card, parts, steps
from recipes.benchmarks.gpu.__main__ import main, text
from recipes.benchmarks.gpu.card import PEAKS, find_card
from recipes.benchmarks.gpu.models import ALL, MICROBATCHES, Candidate, Case, Kind, Sizes, batch_of, build, operations
from recipes.benchmarks.gpu.parts import BARS, GPT_BLOCKS, LLAMA_7B, Figures, Stack, measure_memory
from recipes.benchmarks.harness import read
from recipes.benchmarks.pairs.tables import ALONE, STEADY
from tests.harness.pool import Pool
from tests.runtime.test_memory import Live

TOY = ["--toy", "--rounds", "1"]
PLAIN, STAGE, WAVES, LAYERS = (one.label for one in ALL[:4])


def found_in(folder: Path, pool: Pool, *arguments: str) -> tuple[dict[str, Any], str, bytes]:
    files = {kind: folder / f"found.{kind}" for kind in ("json", "md", "png")}
    options = ["--json", str(files["json"]), "--table", str(files["md"]), "--picture", str(files["png"])]
    assert pool.run(1, partial(main, [*TOY, *arguments, *options])) == [0]
    return json.loads(files["json"].read_text()), files["md"].read_text(), files["png"].read_bytes()


def test_a_stack_runs_in_pairs_behind_emulated_collectives(pool: Pool, tmp_path: Path) -> None:
    data, page, _ = found_in(tmp_path, pool, "--parts", "pairs")
    assert data["failed"] == {} and len(data["pairs"]) == 1
    assert "## Two micro-batches at once" in page


class TransferringCard(card.Card):
    """Counts the emulated collectives."""

    count = 0

    def transfer(self, seconds: float) -> card.SleepingTransfer:
        self.count += 1
        return super().transfer(seconds)


@pytest.mark.parametrize("way", [ALONE, STEADY])
def test_each_block_waits_for_a_collective_forward_and_backward(way: str) -> None:
    counting = TransferringCard()
    stack = Stack(Sizes(16, 2, 32, num_blocks=3), 8, counting)
    stack.step(way, 2)
    assert counting.count == 0, "compute alone"
    stack.collective = 1e-5
    stack.step(way, 2)
    stack.close()
    assert counting.count == 2 * 2 * 3


def test_three_parts_run_on_a_cpu(pool: Pool, tmp_path: Path) -> None:
    data, page, picture = found_in(tmp_path, pool, "--blocks", "eager", "--parts", "llama", "products", "memory")
    assert data["failed"] == {} and [(case["kind"], case["tokens"]) for case in data["steps"]] == [("llama", 16)]
    check_candidates(data["steps"][0])
    assert len(data["memory"]) == 1 and [one["num_blocks"] for one in data["products"]] == [0, 4, 16, 32]
    assert text(read(Figures, data)) == page and picture.startswith(b"\x89PNG")


@pytest.mark.thorough
def test_all_parts_run_on_a_cpu(pool: Pool, tmp_path: Path) -> None:
    data, page, _ = found_in(tmp_path, pool)
    assert data["failed"] == {} and [case["kind"] for case in data["steps"] + data["host"]] == ["llama", "gpt"] * 2
    for case in data["steps"] + data["host"]:
        check_candidates(case)
        assert case["refused"] == {} and len(case["candidates"]) == len(ALL)
    assert "## The host's work" in page


def check_candidates(case: dict[str, Any]) -> None:
    plain, *others = case["candidates"][:4]
    assert [one["label"] for one in (plain, *others)] == [PLAIN, STAGE, WAVES, LAYERS]
    assert plain["of_plain"]["median"] == 1.0
    for one in others:
        assert one["of_plain"]["median"] > 0
        assert one["loss"] == pytest.approx(plain["loss"], rel=0.01)


def test_the_same_table_is_made_again_from_the_figures(pool: Pool, tmp_path: Path) -> None:
    _, page, _ = found_in(tmp_path, pool, "--blocks", "eager", "--parts", "products", "memory")
    again = ["--again", str(tmp_path / "found.json"), "--table", str(tmp_path / "again.md")]
    assert main(again) == 0
    assert (tmp_path / "again.md").read_text() == page


def test_a_candidate_that_fails_is_listed_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(steps, "start_fit", FakeFit)
    figures = steps.measure(TOY_CASE, card.Card(), steps.Rounds(rounds=2, steps=1), said.append)
    assert [one.label for one in figures.candidates] == [PLAIN]
    no_thread, no_memory = "ValueError: no thread", "OutOfMemoryError: 2 GiB"
    assert figures.refused == {STAGE: no_thread, WAVES: no_thread, LAYERS: no_memory}
    assert said[1:] == [f"llama, 8 tokens, {label}: failed: {why}" for label, why in figures.refused.items()]


class FakeFit:
    """Fails when it is set up, under the strategy, or in its first timed step, with 3-D layers."""

    loss = 1.0

    def __init__(self, case: Case, candidate: Candidate, *_: Any) -> None:
        self._runs_left = 1 if candidate.has_3d_layers else 100
        if candidate.waves:
            raise ValueError("no thread")

    def run(self, num_steps: int) -> None:
        self._runs_left -= 1
        if self._runs_left < 0:
            raise torch.OutOfMemoryError("2 GiB")

    def close(self) -> None:
        pass


TOY_CASE = Case("llama", Sizes(8, 1, 8, 4), 1, 8)


def test_what_was_measured_is_kept_after_each_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    monkeypatch.setattr(parts, "measure_memory", lambda *_: kept.read_text() and pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        main([*TOY, "--parts", "products", "memory", "--json", str(kept)])
    assert len(read(Figures, json.loads(kept.read_text())).products) == 4


def test_a_bar_is_reached_missed_or_not_measured(pool: Pool, tmp_path: Path) -> None:
    figures = read(Figures, {"machine": [], "peak": None, "bar_tokens": 16, "failed": {}} | _steps(0.97))
    (reached, *_) = figures.verdicts
    assert reached == f"llama, 16 tokens, {STAGE}: at least 0.97 of plain: reached, 0.970"
    assert read(Figures, figures.plain() | _steps(0.969)).verdicts[0].endswith("MISSED, 0.969")
    assert all(line.endswith("not measured") for line in figures.verdicts[1:]) and len(BARS) == 12


def _steps(speed: float) -> dict[str, Any]:
    spread = {"median": speed, "least": speed, "most": speed}
    one = {"label": STAGE, "step": spread, "cpu": 1.0, "of_plain": spread, "teraflops": 1.0, "of_peak": None}
    candidate = one | {"kernels": 1.0, "microseconds": 1.0, "loss": 1.0}
    case = {"kind": "llama", "width": 8, "num_blocks": 4, "tokens": 16, "samples": 1, "refused": {}}
    return {"steps": [case | {"candidates": [candidate]}], "host": [], "memory": [], "products": []}


class CountingCard(card.Card):
    """Counts the bytes of tensors, as a GPU's allocator does."""

    def peak_memory_of(self, run: Callable[[], None]) -> int:
        peak = 0

        class Counting(Live):
            def __torch_dispatch__(self, *call: Any) -> Any:
                nonlocal peak
                result = super().__torch_dispatch__(*call)
                peak = max(peak, self.num_bytes)
                return result

        with Counting():
            run()
        return peak


def test_a_stage_holds_none_of_the_outputs_that_it_has_sent() -> None:
    figures = measure_memory(Sizes(32, 2, 128, 4), 64, CountingCard(), lambda _: None)
    assert figures.output_bytes == 64 * 32 * 2 and figures.saved == pytest.approx(1.0, abs=0.05)


def test_operations_are_those_of_the_matrices_and_of_causal_attention() -> None:
    sizes = Sizes(width=4096, num_heads=32, feed_forward=11008, num_blocks=1)
    weights = 4 * 4096**2 + 3 * 4096 * 11008
    assert operations("llama", sizes, (2, 1024)) == 2048 * 6 * (weights + 1024 * 4096)


def test_a_gpu_is_described_with_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    properties = SimpleNamespace(total_memory=80 * 2**30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(card, "_DRIVER", tmp_path / "version")
    (tmp_path / "version").write_text("580.95.05\n")
    gpu = card.find_card(toy=False)
    assert gpu.about.startswith("NVIDIA H100 80GB HBM3, 80 GiB, 132 SMs; driver 580.95.05, CUDA ")
    assert (gpu.peak, gpu.accelerator, gpu.compiler) == (989, "gpu", "inductor")


def test_memory_at_the_peak_is_counted_from_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, calls = object.__new__(card.GpuCard), []
    gpu.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 350)
    assert gpu.peak_memory_of(lambda: calls.append("run")) == 250
    assert calls == ["wait", "reset", "run"]


@pytest.mark.parametrize(
    ("name", "device", "is_annotation", "counts"),
    [
        ("ampere_bf16_s16816gemm", DeviceType.CUDA, False, True),
        ("Memcpy DtoD (Device -> Device)", DeviceType.CUDA, False, False),
        ("Memset (Device)", DeviceType.CUDA, False, False),
        ("Optimizer.step#SGD.step", DeviceType.CUDA, True, False),
        ("cudaLaunchKernel", DeviceType.CPU, False, False),
    ],
)
def test_kernels_are_counted_without_copies_and_ranges(
    name: str, device: DeviceType, is_annotation: bool, counts: bool
) -> None:
    event = SimpleNamespace(name=name, device_type=device, is_user_annotation=is_annotation)
    assert card.is_kernel(event) is counts


def test_full_sizes_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if find_card(toy=True).accelerator == "cpu":
        assert main([]) == 2
        assert "--toy runs it on the CPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-40GB", 312),
     ("NVIDIA L40S", 362), ("NVIDIA GH200 480GB", 989)],
)  # fmt: skip
def test_a_card_is_found_by_a_part_of_its_name(name: str, peak: float) -> None:
    assert next(value for part, value in PEAKS.items() if part in name) == peak


@pytest.mark.parametrize(
    "kind, sizes", [pytest.param("llama", LLAMA_7B, marks=pytest.mark.thorough), ("gpt", GPT_BLOCKS)]
)
def test_plans_for_the_card_take_as_long_as_its_steps(kind: Kind, sizes: Sizes) -> None:
    """What the page about plans says of 16,384 tokens per micro-batch."""
    page = Path(__file__).parents[3] / "docs/benchmarks/gpu.json"
    found = json.loads(page.read_text())["steps"]
    case = next(one for one in found if (one["kind"], one["tokens"]) == (kind, 16384))
    samples = 4 * MICROBATCHES
    batch = batch_of(kind, sizes, (samples, 4096), "bf16-true", torch.device("cpu"))
    facts = read_model(build(kind, sizes, 4096, torch.device("meta")), batch, samples, precision="bf16-true")
    model = StepModel(facts, replace(machine("h200"), ranks_per_node=1))
    step = model.closed_form(candidates.Candidate(samples=4, num_microbatches=MICROBATCHES))
    assert 0.9 <= step.seconds / case["candidates"][0]["step"]["median"] <= 1.0
