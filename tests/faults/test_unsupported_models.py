"""Unsupported models that only a running step can detect: the error names the feature, and no rank hangs.

Supported is:  for block in blocks: x = block(x)     in order, functions of torch in between, no context but no_grad
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout, Training, fit


class NoPass(models.MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


class InferenceMode(models.MLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return super().forward(x)


class Between(models.MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
            x = x * 2 if x.sum() > 0 else x
        return self.head(x)


class Reversed(models.MLP):
    """Gradients are reversed between blocks."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return -gradient

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = self.Reverse.apply(block(x))
        return self.head(x)


class ChangesArgument(models.MLP):
    """A tensor is changed in place that was used between blocks before."""

    def forward(self, x: Tensor) -> Tensor:
        x, offset = self.embedding(x), torch.zeros(models.WIDTH)
        for block in self.blocks:
            x = block(x) + offset
            offset += 1
        return self.head(x)


class Penalty(models.MLP):
    def loss(self, batch: models.Batch) -> Tensor:
        return super().loss(batch) + sum(parameter.square().sum() for parameter in self.parameters())


class Skipped(models.MLP):
    def training_step(self, batch: models.Batch, batch_idx: int) -> None:
        self.loss(batch)


REFUSED = {
    "inference mode around the stack": (InferenceMode, "context"),
    "no pass through the stack": (NoPass, "0 of the 8 blocks"),
    "a branch on values between blocks": (Between, "__bool__.*before blocks"),
    "a function of autograd between blocks": (Reversed, "apply.*before blocks"),
    "a change in place between blocks": (ChangesArgument, "changes a tensor in place"),
    "a penalty on the blocks": (Penalty, "weight_decay"),
    "a batch without a loss": (Skipped, "loss"),
}


def batches() -> list[models.Batch]:
    return models.vectors((8, 8))


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(2, 1, 1, "1f1b")], ids=str)
@pytest.mark.parametrize("case", REFUSED)
def test_error_names_the_feature_and_all_ranks_end(pool: Pool, case: str, layout: Layout) -> None:
    model, named = REFUSED[case]
    with pytest.raises(RunFailed) as caught:
        pool.run(layout.world_size, fit, Training(model, batches), layout, timeout=30.0)
    failures = caught.value.failures
    assert "UnsupportedError" in failures[0].bases, str(caught.value)
    assert re.search(named, failures[0].message, re.IGNORECASE), failures[0].message
    assert [failure.rank for failure in failures if failure.kind == "timed out"] == []
    assert len(failures) == layout.world_size
