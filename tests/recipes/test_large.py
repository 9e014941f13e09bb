"""The recipe of large models: published sizes, layouts that are kept with their plans, packed text, exact training."""

import json
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning import LightningModule
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from lightning_hanayo.planner.ranking import load_plan
from lightning_hanayo.strategy import HanayoStrategy
from recipes.large import memory, operations, startup
from recipes.large.data import Pretraining
from recipes.large.module import CausalLM
from recipes.large.operations import RUNS, Operations
from recipes.large.plans import CASES, FOLDER, PAGE, PLANS, planned, table
from tests.harness import models
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, run

PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
"""parameters"""
TINY: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 32, "num_key_value_heads": 2},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("name", covered(CASES, by=["llama3-8b-8xh100", "qwen3-30b-a3b-64xh100"]))
def test_a_layout_is_that_of_its_plan(name: str) -> None:
    case, plan = CASES[name], json.loads(PLANS.read_text())[name]
    path = FOLDER / "layouts" / f"{name}.yaml"
    trainer, options, own = yaml.safe_load(path.read_text())["trainer"], load_plan(path), plan["layouts"][0]
    ranks = options["pipeline_parallel_size"] * options["data_parallel_size"] * prod(own["mesh"])
    assert trainer["devices"] * trainer["num_nodes"] == case.devices == ranks
    assert options["num_microbatches"] == own["num_microbatches"]
    assert own["memory"]["total"] <= plan["memory_limit"]
    assert plan["parameters"] == PUBLISHED.get(case.model, plan["parameters"])
    assert HanayoStrategy(**options).options.num_microbatches == own["num_microbatches"]


def test_the_page_has_the_plans() -> None:
    assert table(json.loads(PLANS.read_text())) in PAGE.read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_made_again(name: str, tmp_path: Path) -> None:
    assert planned(CASES[name], tmp_path) == json.loads(PLANS.read_text())[name]
    assert (tmp_path / f"{name}.yaml").read_text() == (FOLDER / "layouts" / f"{name}.yaml").read_text()


@pytest.mark.thorough
def test_what_a_run_does_is_counted() -> None:
    run = Operations(CASES[RUNS[0]], json.loads(PLANS.read_text())[RUNS[0]])
    assert run.groups() == {"nccl": 11, "gloo": 7}
    messages = 8 * 32 * 4 * 2  # batches, micro-batches, a rank's stages in two waves, forward and backward
    assert run.messages() == (messages, messages * 2 * 8192 * 8192 * 4 / 8)
    assert run.saved == 70_553_706_496 * (4 + 8)
    assert run.lost < 0.01


@pytest.mark.thorough
def test_the_page_of_operations_has_their_table() -> None:
    assert operations.table(json.loads(PLANS.read_text())) in operations.PAGE.read_text()


def test_a_phase_counts_without_those_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(0.0, 0.0), (2.0, 1.0), (5.0, 2.0), (9.0, 4.0)])
    monkeypatch.setattr(startup, "_now", lambda: next(times))
    phases = startup.Phases()
    with phases.phase("set-up"), phases.phase("groups"):
        pass
    assert phases.seconds == {"groups": [3.0, 1.0], "set-up": [6.0, 3.0]}


def test_the_functions_of_the_phases_exist() -> None:
    with startup.Phases().recording():
        assert all(callable(getattr(owner, name)) for functions in startup.PHASES.values() for owner, name in functions)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_cut_layout_holds_the_memory_that_is_planned(name: str) -> None:
    own = memory.CutLayout.of(name, json.loads(PLANS.read_text())[name])
    assert own.planned() == pytest.approx(own.measured(), rel=0.05)


def tiny(kind: str) -> LightningModule:
    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": 16, "num_hidden_layers": 8, "num_attention_heads": 4}
    module = CausalLM(kind, sizes | TINY[kind], learning_rate=1e-2, warmup_steps=2)
    module.configure_model()
    return module


def samples() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": batch["input_ids"]} for batch in models.texts((8, 8, 8))]


LAYOUTS = [Layout(2, 2, 1), Layout(2, 1, 1, cube=(1, 2, 1)), Layout(2, 1, 1, cube=(2, 1, 1))]


@pytest.mark.parametrize(
    ("kind", "layout"),
    covered([(kind, layout) for kind in TINY for layout in LAYOUTS], by=[("llama", LAYOUTS[0])]),
    ids=str,
)
def test_it_trains_as_in_one_process(pool: Pool, kind: str, layout: Layout) -> None:
    dtype, tolerance = (torch.float64, 1e-10) if kind == "llama" else (torch.float32, 1e-5)  # experts have no fp64
    training = Training(partial(tiny, kind), samples, dtype, steps=3, clip=1.0)
    assert_close(run(pool, training, layout).weights, plain(pool, training).weights, tolerance)


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    """Ten documents of 1 to 10 tokens, and a tokenizer of numbers, in which 0 ends a document."""
    numbers = [list(range(1, length + 1)) for length in range(1, 11)]
    for part in (0, 1):
        lines = "\n".join(" ".join(map(str, one)) for one in numbers[5 * part : 5 * part + 5])
        (tmp_path / f"{part}.txt").write_text(lines + "\n")
    tokenizer = Tokenizer(WordLevel({str(number): number for number in range(11)}, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = {"path": str(tmp_path), "tokenizer": str(tmp_path / "tokenizer.json"), "end": 0}
    return {"vocab_size": 11, "context": 4, "batch_size": 2} | options


def read(data: Pretraining) -> list[list[int]]:
    return [row for batch in data.train_dataloader() for row in batch["input_ids"].tolist()]


def test_documents_are_packed_without_padding(texts: dict[str, Any]) -> None:
    rows = read(Pretraining(**texts))
    row = [token for length in range(1, 11) for token in (*range(1, length + 1), 0)]
    assert rows == [row[start : start + 4] for start in range(0, len(row) - 3, 4)]


def test_data_ranks_take_turns_and_go_on_where_they_were(texts: dict[str, Any]) -> None:
    whole = read(Pretraining(**texts))
    for rank in range(2):
        data = Pretraining(**texts)
        loader: Any = data.train_dataloader()
        loader.dataset.rank, loader.dataset.num_ranks = rank, 2
        batches = iter(loader)
        first, state = next(batches)["input_ids"].tolist(), loader.state_dict()
        assert first == [whole[rank], whole[rank + 2]]
        rest = [batch["input_ids"].tolist() for batch in batches]
        resumed: Any = Pretraining(**texts).train_dataloader()
        resumed.dataset.rank, resumed.dataset.num_ranks = rank, 2
        resumed.load_state_dict(state)
        assert [batch["input_ids"].tolist() for batch in resumed] == rest


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        Pretraining(11, 4, path="texts")
