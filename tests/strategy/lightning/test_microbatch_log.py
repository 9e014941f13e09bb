"""What micro-batches log becomes what the whole batch would have logged.

shares 3/4, 1/4      means: weighted      sums: added      the same key twice: first with first, second with second
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.batches.plan import BatchSource
from lightning_hanayo.strategy.batch_split import WholeSplitter
from lightning_hanayo.strategy.lightning.microbatch_log import MicrobatchLog

SPLIT = WholeSplitter().split(torch.zeros(4, 1), 2, BatchSource())


def logged(values: list[list[float]], shares: tuple[float, ...] = (0.75, 0.25), **options: Any) -> _ResultCollection:
    """Micro-batch m logs values[m], one after the other, all under one name."""
    results = _ResultCollection(training=True)
    log = MicrobatchLog(SimpleNamespace(_results=results), SPLIT, shares, WholeSplitter())  # type: ignore[arg-type]
    with log.collecting():
        for m, several in enumerate(values):
            log.enter(m)
            for value in several:
                results.log("training_step", "v", torch.tensor(value), on_step=True, on_epoch=True, **options)
    return results


def step_and_epoch(results: _ResultCollection) -> tuple[float, float]:
    return tuple(float(results.metrics(on_step)["callback"]["v"]) for on_step in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2.0, 2.0)),
        ({"reduce_fx": "mean"}, (2.0, 2.0)),
        ({"reduce_fx": torch.sum}, (6.0, 6.0)),
        ({"reduce_fx": torch.max}, (5.0, 5.0)),
        ({"reduce_fx": torch.min}, (1.0, 1.0)),
    ],
)
def test_one_value_each(options: dict[str, Any], expected: tuple[float, float]) -> None:
    assert step_and_epoch(logged([[1.0], [5.0]], **options)) == expected


def test_the_same_key_twice_in_a_step() -> None:
    step, epoch = step_and_epoch(logged([[0.0, 1.0], [0.0, 1.0]]))
    assert (step, epoch) == (1.0, 0.5), "the last one, and the mean of both, as in one process"


def test_the_batch_size_is_what_lightning_reads_from_the_whole_batch() -> None:
    """As in one process: micro-batches of a list may give another size than the batch does."""
    results = _ResultCollection(training=True)
    for length, value in ((2, 1.0), (6, 5.0)):
        results.batch = [{"x": torch.ones(length)}] * 4
        log = MicrobatchLog(SimpleNamespace(_results=results), SPLIT, (0.5, 0.5), WholeSplitter())  # type: ignore[arg-type]
        with log.collecting():
            for m in range(2):
                log.enter(m)
                results.log("training_step", "read", torch.tensor(value), on_epoch=True)
                results.log("training_step", "given", torch.tensor(value), on_epoch=True, batch_size=3)
    means = [float(results.metrics(False)["callback"][name]) for name in ("read", "given")]
    assert means == [(2 * 1.0 + 6 * 5.0) / 8, 3.0]


def test_without_a_share_not_even_a_nan_counts() -> None:
    assert step_and_epoch(logged([[2.0], [float("nan")]], shares=(1.0, 0.0))) == (2.0, 2.0)


def test_a_value_of_placeholders_is_refused() -> None:
    results = _ResultCollection(training=True)
    log = MicrobatchLog(SimpleNamespace(_results=results), SPLIT, (0.5, 0.5), WholeSplitter())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"self.log\('v'\)"), log.collecting():
        log.enter(0)
        results.log("training_step", "v", torch.zeros((), device="meta"))
    assert not results and "update_metrics" not in vars(results)
