"""What a step logs for its pieces is logged once, as one value."""

from math import nan
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_hanayo.checking.trainings.reference import PiecewiseLog
from tests.harness import models


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, dict[str, Any]]]:
    """What reaches Lightning."""
    calls: dict[str, tuple[Any, dict[str, Any]]] = {}

    def log(_: Any, name: str, value: Any, **keywords: Any) -> None:
        calls[name] = value, keywords

    monkeypatch.setattr(models.MLP, "log", log)
    return calls


def run(pieces: list[list[tuple[float, Any]]], **keywords: Any) -> PiecewiseLog:
    """Log (weight, value) for each piece of each data rank; a piece has two samples."""
    module = models.MLP()
    log = PiecewiseLog(module, len(pieces))
    for data_rank, row in enumerate(pieces):
        for weight, value in row:
            log.begin(data_rank, weight, 2)
            module.log("x", value, **keywords)
    log.finish()
    return log


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [({}, 1.75), ({"reduce_fx": "sum"}, 3.0), ({"reduce_fx": max}, 2.0), ({"reduce_fx": torch.min}, 1.0)],
    ids=["mean", "sum", "max", "min"],
)
def test_values_are_reduced_as_the_user_says(logged: Any, keywords: dict[str, Any], expected: float) -> None:
    run([[(0.25, torch.tensor(1.0)), (0.75, 2.0)]], **keywords)
    value, found = logged["x"]
    assert float(value) == expected and found["batch_size"] == 4


def test_a_piece_of_weight_zero_does_not_count(logged: Any) -> None:
    run([[(1.0, 3.0), (0.0, nan)]])
    assert float(logged["x"][0]) == 3.0


def test_only_the_first_data_rank_counts_unless_they_are_synced(logged: Any) -> None:
    rows: list[list[tuple[float, Any]]] = [[(1.0, 1.0)], [(1.0, 3.0)]]
    run(rows)
    assert float(logged["x"][0]) == 1.0
    run(rows, sync_dist=True)
    assert float(logged["x"][0]) == 2.0


def test_the_value_of_a_metric_in_a_batch_is_not_merged(logged: Any) -> None:
    metric = MeanMetric()
    log = run([[(0.5, metric), (0.5, metric)]])
    assert logged["x"][0] is metric
    assert [log.has_merged(name) for name in ("x (batch 0)", "x_step (batch 1)", "x (epoch)", "y (batch 0)")] == [
        False, False, True, True,
    ]  # fmt: skip


def test_calls_outside_of_a_step_are_passed_on(logged: Any) -> None:
    module = models.MLP()
    PiecewiseLog(module, 1)
    module.log("x", 1.0, on_epoch=True)
    assert logged["x"] == (1.0, {"on_epoch": True})
