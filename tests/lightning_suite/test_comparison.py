"""Which tests count, which are lost, and why: from results of a few tests that were never run."""

import json
from pathlib import Path

import pytest

from lightning_hanayo.strategy.batch_split import BatchSplitter
from tests.harness import models
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer
from tests.lightning_suite import injection
from tests.lightning_suite.comparison import Comparison, Reason, reason_for
from tests.lightning_suite.page import page
from tests.lightning_suite.results import SuiteRun, TestResult, by_name

LOST = "tests/tests_pytorch/core/test_b.py::test_two[1]"


def suite_run(column: str, **outcomes: str) -> SuiteRun:
    names = {
        "one": "tests/tests_pytorch/core/test_a.py::test_one",
        "two": LOST,
        "cli": "tests/tests_pytorch/test_cli.py::test_cli",
    }
    runs = 2 if column.startswith("hanayo") else 0
    results = by_name(TestResult(names[key], outcome, engine_runs=runs) for key, outcome in outcomes.items())
    return SuiteRun(column, "2026-01-01", "4 cores", {"torch": "2.13"}, results)


RUNS = [
    suite_run("hanayo 1", one="passed", two="failed", cli="passed"),
    suite_run("stock", one="passed", two="passed", cli="skipped"),
]


def test_tests_count_that_pass_with_the_stock_strategy() -> None:
    comparison = Comparison.of(RUNS)
    assert comparison.header() == ["package", "stock", "hanayo 1", "engine ran"]
    assert comparison.rows() == [["core", "2", "1", "2"], ["all", "2", "1", "2"]]
    assert comparison.lost(RUNS[0]) == [LOST]


def test_a_reason_is_about_names_and_runs() -> None:
    reasons = [Reason("elsewhere", ("core/*",), ("hanayo 2",)), Reason("here", ("core/test_b.py::test_two[*]",))]
    assert reason_for(LOST, "hanayo 1", reasons) == reasons[1]
    assert reason_for(LOST, "hanayo 2", reasons) == reasons[0]
    assert reason_for("tests/tests_pytorch/core/test_a.py::test_one", "hanayo 1", reasons) is None


def test_the_page_names_each_lost_test_with_its_reason() -> None:
    text = page(Comparison.of(RUNS), [Reason("It can't be.", ("core/test_b.py*",))])
    assert "- It can't be. (1):\n  - `core/test_b.py::test_two[1]`" in text
    assert "no reason is known yet" in page(Comparison.of(RUNS), [])


def test_results_are_read_as_they_were_saved(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    RUNS[0].save(path)
    assert SuiteRun.load(path) == RUNS[0]
    assert json.loads(path.read_text())["column"] == "hanayo 1"


def test_a_single_sample_runs_twice_and_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for strategy in ("auto", make_strategy(Layout(num_microbatches=2))):
        trainer = make_trainer(Layout(), max_steps=2, strategy=strategy)
        trainer.fit(models.build(models.MLP), make_loader(models.vectors((1, 1))))
        losses.append(trainer.callback_metrics["train_loss"])
        monkeypatch.setattr(BatchSplitter, "split", BatchSplitter.split)  # restored after the test
        injection._double_single_samples()
    assert losses[0] == losses[1]
