"""Losses of well-known trainings with no option: what one process computes, and with two data ranks what DDP does."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.equivalence.test_step_auto import fit_ddp
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, fit, merge


class Clip(models.MLP):
    """Two views of each sample in one pass, and a learned temperature, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def loss(self, batch: Batch) -> Tensor:
        images, texts = functional.normalize(self(torch.cat([batch["x"], batch["x"].flip(1)])), dim=1).chunk(2)
        scores, pairs = self.logit_scale.exp() * images @ texts.T, torch.arange(len(images))
        return (functional.cross_entropy(scores, pairs) + functional.cross_entropy(scores.T, pairs)) / 2


class VicReg(models.MLP):
    """Variance, invariance and covariance of two views."""

    def loss(self, batch: Batch) -> Tensor:
        one, other = self(torch.cat([batch["x"], batch["x"] + 0.1])).chunk(2)
        loss = functional.mse_loss(one, other)
        for view in (one, other):
            spread = (view.var(0) + 1e-4).sqrt()
            centred = view - view.mean(0)
            covariance = centred.T @ centred / (len(view) - 1)
            loss = loss + functional.relu(1 - spread).mean() + covariance.triu(1).square().sum() / view.shape[1]
        return loss


class Grpo(models.MLP):
    """Advantages within groups of the batch, whitened over all of it, and clipped ratios."""

    def loss(self, batch: Batch) -> Tensor:
        scores = self(batch["x"]).log_softmax(1)
        chosen = scores.gather(1, batch["y"][:, None])[:, 0]
        rewards = batch["x"][:, 1]
        with torch.no_grad():
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        ratios = (chosen - chosen.detach() + 0.3 * rewards.tanh()).exp()
        kept = torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
        return -kept.mean() + 0.04 * (scores.exp() * scores).sum(1).mean()


class Cox(models.MLP):
    """The partial likelihood: each sample is compared with all that live longer."""

    def loss(self, batch: Batch) -> Tensor:
        order = batch["x"][:, 0].argsort(descending=True)
        risks, events = self(batch["x"])[order, 0], (batch["y"][order] > 0).to(batch["x"].dtype)
        return -((risks - risks.logcumsumexp(0)) * events).sum() / events.sum().clamp(min=1)


class Dice(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        found, wanted = self(batch["x"]).softmax(1), functional.one_hot(batch["y"], models.CLASSES)
        return 1 - (2 * (found * wanted).sum(0) / (found.sum(0) + wanted.sum(0) + 1e-3)).mean()


class Mixup(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        scores = self(0.7 * batch["x"] + 0.3 * batch["x"].roll(1, 0))
        losses = [functional.cross_entropy(scores, labels) for labels in (batch["y"], batch["y"].roll(1, 0))]
        return 0.7 * losses[0] + 0.3 * losses[1]


class Bert(models.MLP):
    """A mean over masked words beside one over samples."""

    def loss(self, batch: Batch) -> Tensor:
        scores = self(batch["x"])
        words = batch["y"].where(batch["x"][:, 0] > -0.5, -100)
        return functional.cross_entropy(scores, words) + functional.cross_entropy(scores[:, :2], batch["y"] % 2)


class NumItems(models.MLP):
    """The number of labels of all batches that are accumulated."""

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"], reduction="sum") / 20


class Smoothed(models.MLP):
    """The smoothed part is a mean over the labels that count, too."""

    def loss(self, batch: Batch) -> Tensor:
        labels = batch["y"].where(batch["x"][:, 0] > -0.5, -100)
        loss = functional.cross_entropy(self(batch["x"]), labels, label_smoothing=0.1, ignore_index=-100)
        self.log("kept", (labels != -100).double().mean())
        return loss


LOSSES: list[Any] = [Clip, VicReg, Grpo, Cox, Dice, Mixup, Bert, NumItems, Smoothed]
LAYOUTS = [
    Layout(2, 1, 2, step="auto"),
    Layout(1, 1, 1, cube=(1, 2, 1), step="auto"),
    Layout(1, 1, 2, cube=(2, 1, 1), step="auto"),
    Layout(2, 1, 1, cube=(1, 1, 2), step="auto"),
    Layout(2, 2, 1, step="auto"),
]
SINGLE_STAGE = Layout(1, 1, 1, "auto", num_microbatches=1, cube=(1, 2, 1), step="auto")
"""of blocks, whose ranks share a batch that has one micro-batch"""


TURNS = ((Clip, 0), (Cox, 4), (Bert, 1), (NumItems, 4))
"""the default cases: losses with the numbers of their layouts"""


@pytest.mark.parametrize(
    ("model", "layout"),
    covered(product(LOSSES, LAYOUTS), by=[(one, LAYOUTS[turn]) for one, turn in TURNS]),
)
def test_equals_one_process(pool: Pool, model: Any, layout: Layout) -> None:
    training = Training(model, partial(models.vectors, (16, 16, 12)), dtype=torch.float64, steps=3)
    outcome = merge(pool.run(layout.world_size, fit, training, layout), layout)
    expected = pool.run(layout.data, fit_ddp, training)[0] if layout.data > 1 else plain(pool, training).weights
    assert_close(
        outcome.weights, expected, 1e-8
    )  # Adam enlarges the rounding of a gradient that is 0, as of Cox's bias


@pytest.mark.parametrize("model", covered([Smoothed, Dice, VicReg], by=[Smoothed]))
def test_the_shares_of_a_cube_add_up_without_a_schedule(pool: Pool, model: Any) -> None:
    training = Training(model, partial(models.vectors, (16, 16, 12)), dtype=torch.float64, steps=3)
    outcome = merge(pool.run(2, fit, training, SINGLE_STAGE), SINGLE_STAGE)
    assert_close(outcome.weights, plain(pool, training).weights, 1e-10)
