"""Validation and prediction on batches of many types give what one process gives: logged means, and merged results.

Training on them is in the catalog of habits.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from tests.habits import batches
from tests.habits.habit import LAYOUTS
from tests.harness.models import build
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, make_loader, make_strategy


class Lists(batches.PoolsList):
    """Results with one item for each sample, in lists too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("mean", loss)
        self.log("of given size", loss, batch_size=len(batch["y"]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(torch.stack([x.mean(0) for x in batch["x"]]))
        return {"scores": scores, "parts": [x[:, 0] for x in batch["x"]], "names": [str(len(x)) for x in batch["x"]]}


class SequenceFirst(batches.SequenceFirst):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["x"])


class TwoLosses(batches.TwoLosses):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.loss(batch))


CASES: dict[str, tuple[Any, Callable[[], Any], dict[str, Any]]] = {
    "lists": (Lists, batches.ragged_sequences, {}),
    "sequence-first": (SequenceFirst, batches.sequence_first, {"batch_dim": 1}),
    "two loaders": (TwoLosses, batches.two_loaders, {}),
}


EVALUATED = [
    ("lists", "pipeline"), ("lists", "cube"), ("sequence-first", "both"), ("two loaders", "pipeline"),
    ("two loaders", "both"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "layout"),
    covered(EVALUATED, by=[("lists", "pipeline"), ("two loaders", "both")]),
)
def test_evaluation(pool: Pool, case: str, layout: str) -> None:
    logged, predicted = pool.run(LAYOUTS[layout].world_size, evaluate, case, LAYOUTS[layout])[0]
    ((expected_log, expected),) = pool.run(1, evaluate, case, Layout())
    assert logged == [pytest.approx(values, rel=1e-9) for values in expected_log]
    assert_equal(predicted, expected)


def evaluate(case: str, layout: Layout) -> tuple[Any, Any]:
    """What one rank logs in validation, and predicts; Lightning can't predict with several loaders at once."""
    model, make, options = CASES[case]
    warnings.filterwarnings("ignore", "the loaders' batches of 8 and 4 samples are cut into 2 micro-batches")
    warnings.filterwarnings("ignore", "Trying to infer the `batch_size` from an ambiguous collection")
    strategy = make_strategy(layout, **options) if layout.world_size > 1 else "auto"
    trainer = Trainer(
        accelerator="cpu", devices=layout.world_size, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module, made = build(model, torch.float64), make()
    if isinstance(made, dict):
        return trainer.validate(module, CombinedLoader(made, "min_size"), verbose=False), None
    return trainer.validate(module, make_loader(made), verbose=False), trainer.predict(module, make_loader(made))


def assert_equal(actual: Any, expected: Any) -> None:
    """Trees of results are equal."""
    assert type(actual) is type(expected)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    elif isinstance(expected, dict):
        assert_equal(list(actual.items()), list(expected.items()))
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    else:
        assert actual == expected
