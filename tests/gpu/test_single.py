"""One process trains as a plain Trainer does, in each precision: P = 1, whole or as a wave of two stages and more.

    plain Trainer     accumulate_grad_batches=4, on micro-batches of 2 samples
    HanayoStrategy    num_microbatches=4, on batches of 8 samples

Both compute the same products on the same shapes and add gradients in the same order. So with deterministic algorithms
all weights must be equal to the last bit. With the algorithms that users get they may differ by rounding, which AdamW
turns into at most a few steps of the learning rate.
"""

from typing import Any

import pytest
import torch

from tests.gpu.conftest import Launch
from tests.harness import models
from tests.harness.devices import be_deterministic, in_pieces, largest_gap, on_devices, train_on
from tests.harness.training import Layout, Outcome
from tests.strategy.optimizer import test_master_weights as master_weights

SIZES, PIECES = (8,) * 5, 4
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
WAVES = (1, 2)


def both(device: str, model: Any, batches: Any, precision: str, waves: int) -> tuple[Outcome, Outcome]:
    """The outcomes with and without the strategy."""
    whole, layout = batches(SIZES), Layout(waves=waves, num_microbatches=PIECES)
    options: dict[str, Any] = {"accumulate_grad_batches": PIECES, "precision": precision}
    return (
        train_on(device, layout, model, whole, precision=precision),
        train_on(device, None, model, in_pieces(whole, PIECES), **options),
    )


def both_deterministic(device: str, *arguments: Any) -> tuple[Outcome, Outcome]:
    """The outcomes by deterministic algorithms."""
    be_deterministic()
    return both(device, *arguments)


@pytest.mark.parametrize(
    ("device", "precision", "waves"),
    on_devices(
        [(precision, waves) for precision in PRECISIONS for waves in WAVES],
        cpu=[("32-true", 1), ("16-mixed", 2)],
    ),
)
def test_is_equal_to_a_plain_trainer_to_the_last_bit(launch: Launch, device: str, precision: str, waves: int) -> None:
    ((ours, plain),) = launch(device, 1, both_deterministic, models.MLP, models.vectors, precision, waves)
    gap = largest_gap(ours, plain)
    launch.say(device, f"{precision}, W={waves}: largest difference of a weight after {len(SIZES)} steps {gap:g}")
    assert gap == 0


@pytest.mark.parametrize(("device", "precision"), on_devices(["32-true", "bf16-mixed"], cpu=["32-true"]))
def test_a_gpt_trains_as_with_a_plain_trainer(launch: Launch, device: str, precision: str) -> None:
    ((ours, plain),) = launch(device, 1, both, models.gpt, models.windows, precision, 2)
    gap = largest_gap(ours, plain)
    launch.say(device, f"GPT, {precision}, W=2: largest difference of a weight after {len(SIZES)} steps {gap:g}")
    # A gradient that rounding turns around moves its weight by twice the learning rate, in each step.
    assert gap <= 2 * len(SIZES) * 3e-3
    assert ours.losses[-1] == pytest.approx(plain.losses[-1], rel=0.2)


def both_with_master_weights(device: str, waves: int) -> float:
    """The largest difference of a master weight from one that a loop written by hand has updated."""
    be_deterministic()
    model, layout = master_weights.Descent, Layout(waves=waves, num_microbatches=PIECES)
    _, expected = master_weights.by_hand(model, 0.1, 1, PIECES, device)
    _, ours = master_weights.train(layout, model, 0.1, 1, device)
    assert all(value.dtype is torch.float32 for value in ours.values())
    return max((ours[name].cpu() - value.cpu()).abs().max().item() for name, value in expected.items())


@pytest.mark.parametrize(("device", "waves"), on_devices(WAVES, cpu=[2]))
def test_master_weights_are_those_of_a_loop_written_by_hand(launch: Launch, device: str, waves: int) -> None:
    (gap,) = launch(device, 1, both_with_master_weights, waves)
    launch.say(device, f"bf16-true with fp32 master weights, W={waves}: largest difference of one {gap:g}")
    assert gap == 0
