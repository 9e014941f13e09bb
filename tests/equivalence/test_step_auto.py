"""`step="auto"`: a probe finds out how micro-batches add up; training and validation equal one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.equivalence import test_whole_step as whole
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.training import Layout, Outcome, Training, assert_close, fit, merge

P2 = Layout(2, 1, 1, step="auto")
W2 = Layout(2, 2, 1, step="auto")


class Summed(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"], reduction="sum")


class Ignores(models.MLP):
    """One class isn't learned."""

    def loss(self, batch: Batch) -> Tensor:
        loss = functional.cross_entropy(self(batch["x"]), batch["y"], ignore_index=1)
        self.log("count", float((batch["y"] != 1).sum()), reduce_fx="sum")
        return loss


class Weighted(models.MLP):
    """A mean by weights of the batch, beside one over samples that is logged."""

    def loss(self, batch: Batch) -> Tensor:
        weights = batch["x"][:, 0].square()
        scores = self(batch["x"])
        self.log("accuracy", (scores.argmax(1) == batch["y"]).double().mean())
        losses = functional.cross_entropy(scores, batch["y"], reduction="none")
        return (losses * weights).sum() / weights.sum()


class Perplexity(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        self.log("perplexity", loss.detach().exp())
        return loss


class Penalised(models.MLP):
    """A penalty on weights beside a sum over samples."""

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"], reduction="sum") + self.head.weight.square().sum()


class Dropped(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(functional.dropout(self(batch["x"]), 0.0), batch["y"])


def auto(training: Training, layout: Layout) -> tuple[Outcome, dict[str, Any]]:
    found: dict[str, Any] = {}
    from lightning_hanayo.strategy.losses import step_choice

    take = step_choice.StepChoice._take

    def note(self: Any, verdicts: Any, *, fits: bool) -> bool:
        made = take(self, verdicts, fits=fits)
        found.setdefault("verdicts", []).append([(one.rules, one.difference, one.unknown) for one in verdicts])
        found["rules"], found["once"] = list(map(str, self.rules.rules)), self.runs_once
        return made

    step_choice.StepChoice._take = note  # type: ignore[method-assign]
    try:
        return fit(training, layout), found
    finally:
        step_choice.StepChoice._take = take  # type: ignore[method-assign]


RULES: list[tuple[Any, str]] = [
    (models.MLP, "samples"), (Summed, "nothing: the losses are added up"),
    (whole.Constant, "nothing: the losses are added up"),
    (Ignores, "the values of batch['y'] other than 1"), (models.Skip, "samples"), (Dropped, "samples"),
    (models.gpt2, "the values of batch['labels'] other than -100, without the first of each sequence"),
    (models.llama, "the values of batch['labels'] other than -100, without the first of each sequence"),
]  # fmt: skip
WHOLE: list[Any] = [
    whole.Contrastive, whole.Whitened, whole.TwoDenominators, whole.Normalized, whole.Counts,
    Weighted, Perplexity, Penalised,
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "rule"), [*RULES, *((model, "") for model in WHOLE)], ids=lambda v: getattr(v, "__name__", None)
)
@pytest.mark.parametrize("layout", [P2, W2], ids=["P2", "W2"])
def test_equals_one_process(pool: Pool, model: Any, rule: str, layout: Layout) -> None:
    is_text = model in (models.gpt2, models.llama)
    batches = partial(models.padded, (8, 8, 6), (8,)) if is_text else partial(models.vectors, (8, 8, 6))
    training = Training(model, batches, dtype=torch.float64, steps=3)
    made = pool.run(layout.world_size, auto, training, layout)
    outcome, found = merge([one for one, _ in made], layout), made[0][1]
    print(found)
    expected = plain(pool, training)
    tolerance = 1e-6 if is_text else 1e-12
    assert outcome.losses == pytest.approx(expected.losses, rel=tolerance), found
    assert_close(outcome.gradients, expected.gradients, tolerance)
    assert_close(outcome.weights, expected.weights, 100 * tolerance)
    assert (found["rules"][:1] or [""])[0] == rule or found["once"] == (not rule), found
