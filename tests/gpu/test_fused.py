"""Fused optimizers change weights without raising their version: no cache keeps a value from before the step.

schedule         what is cached
hanayo           autocast's own copies, in the steps' threads
hanayo-zb        bf16 copies of weights for products whose weight gradient waits
"""

from typing import Any

import pytest
import torch

from tests.gpu.conftest import Launch
from tests.harness import models
from tests.harness.devices import be_deterministic, in_pieces, mean_gap, on_devices, train_on
from tests.harness.training import Layout, Outcome

SIZES, PIECES = (8,) * 4, 4


class Fused(models.MLP):
    """Its steps are so large that a stale weight would show at once."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.name)(self.parameters(), lr=0.1, fused=True)
        return optimizer


def both(device: str, name: str, schedule: str, precision: str) -> tuple[Outcome, Outcome]:
    """The outcomes with and without the strategy."""
    be_deterministic()
    whole, layout = models.vectors(SIZES), Layout(waves=2, schedule=schedule, num_microbatches=PIECES)
    options: dict[str, Any] = {"accumulate_grad_batches": PIECES, "precision": precision}

    def model() -> Fused:
        return Fused(name)

    return (
        train_on(device, layout, model, whole, precision=precision),
        train_on(device, None, model, in_pieces(whole, PIECES), **options),
    )


OPTIMIZERS, SCHEDULES = ("SGD", "Adam", "AdamW"), ("hanayo", "hanayo-zb")
ALLOWED = {"hanayo": 0.0, "hanayo-zb": 1e-3}
"""the mean difference of a weight. A step is 0.1, and so is what a stale weight would change. Weight gradients that
wait are computed apart from autograd, and may be rounded differently."""


@pytest.mark.parametrize(
    ("device", "name", "schedule", "precision"),
    on_devices(
        [(name, schedule, "bf16-mixed") for name in OPTIMIZERS for schedule in SCHEDULES]
        + [("AdamW", "hanayo-zb", "32-true")],
        cpu=[("AdamW", "hanayo-zb", "bf16-mixed")],
    ),
)
def test_no_stale_weight_is_used(launch: Launch, device: str, name: str, schedule: str, precision: str) -> None:
    ((ours, plain),) = launch(device, 1, both, name, schedule, precision)
    gap = mean_gap(ours, plain)
    launch.say(device, f"fused {name}, {schedule}, {precision}: mean difference of a weight {gap:g}")
    assert gap <= ALLOWED[schedule]
