"""If user code scales the backward while batches accumulate, each batch's gradients are scaled once.

batch 0    grad = 0.5 * g0          batch 1    grad = 0.5 * g0 + 0.25 * g1, whatever was there already
"""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import models
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, run

LAYOUTS = [Layout(2, 1, 1, "1f1b"), Layout(2, 2, 1, "hanayo-zb"), Layout(2, 1, 2), Layout(1, 1, 2, cube=(1, 2, 1))]


class Backward(models.MLP):
    """Scales each batch less than the one before."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.5 / (1 + self.trainer.fit_loop.epoch_loop.batch_idx)).backward()


class Hooked(models.MLP):
    """Scales in the hook before the backward."""

    def on_before_backward(self, loss: Tensor) -> None:
        loss.register_hook(lambda gradient: gradient * 0.5 / (1 + self.trainer.fit_loop.epoch_loop.batch_idx))


CASES = covered(
    product([Backward, Hooked], LAYOUTS),
    by=[(Backward, LAYOUTS[2]), (Hooked, LAYOUTS[0])],
)


@pytest.mark.parametrize(("model", "layout"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_accumulated_gradients_are_scaled_once(pool: Pool, model: Any, layout: Layout) -> None:
    training = Training(model, partial(models.vectors, (8, 8, 8, 8)), torch.float64, steps=2, accumulate=2)
    outcome, expected = run(pool, training, layout), plain(pool, training)
    assert_close(outcome.gradients, expected.gradients, 1e-10)
    assert_close(outcome.weights, expected.weights, 1e-9)
