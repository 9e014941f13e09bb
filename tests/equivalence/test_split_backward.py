"""Schedules with a split backward (actions I and W) train as one process does.

                 zbv   zb-h1   interleaved-zb   hanayo-zb   dualpipev   a CSV table
(2, 1, 1)         x      x           x                          x            x
(2, 2, 1)                                           x                        x        (P, W, D)
(4, 1, 1)         x
(2, 1, 2)         x                  x
"""

from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_hanayo.schedule import build
from tests.harness import models
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Outcome, Training, assert_close, assert_same_training, run
from tests.schedule.samples import split

LAYOUTS = [
    Layout(2, 1, 1, "zb-h1"),
    Layout(2, 2, 1, "hanayo-zb"),
    Layout(4, 1, 1, "zbv"),
    Layout(2, 1, 2, "zbv"),
    Layout(2, 1, 2, "interleaved-zb"),
    Layout(2, 1, 1, "dualpipev"),
]
WINDOWS = partial(models.windows, (8, 8, 8, 8))
GPT = Training(models.gpt, WINDOWS, accumulate=2, clip=0.1)
DOUBLE = Training(models.gpt, WINDOWS, torch.float64, accumulate=2, clip=0.1)
MIXED = Training(models.gpt, WINDOWS, accumulate=2, precision="bf16-mixed")


@pytest.mark.parametrize("layout", covered(LAYOUTS, by=[LAYOUTS[i] for i in (0, 5)]), ids=str)
def test_gpt_with_tied_embedding(pool: Pool, layout: Layout) -> None:
    outcome, expected = run(pool, DOUBLE, layout), plain(pool, DOUBLE)
    assert_same_training(outcome, expected)
    assert_close(outcome.weights, expected.weights, 1e-10)


def test_gpt_in_single_precision(pool: Pool) -> None:
    assert_same_training(run(pool, GPT, LAYOUTS[1]), plain(pool, GPT))


@pytest.mark.parametrize("num_waves", covered([1, 2], by=[2]))
def test_a_schedule_from_a_csv_file(pool: Pool, tmp_path: Path, num_waves: int) -> None:
    table = tmp_path / "table.csv"
    split(build("hanayo", num_ranks=2, num_microbatches=4, num_waves=num_waves)).to_csv(table)
    outcome = run(pool, DOUBLE, Layout(2, 1, 1, str(table)))
    assert_close(outcome.weights, plain(pool, DOUBLE).weights, 1e-10)


def test_a_tied_weight_is_complete_when_stage_0_is_reduced(pool: Pool, tmp_path: Path) -> None:
    """Stage 0 is reduced before the Ws of stage 3 run, so autograd computes the gradients of tied weights in I."""
    rows = ["0F0 0F1 3F0 3I0 3F1 3I1 0I0 0I1 0W0 0W1 3W0 3W1", "1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1"]
    table = tmp_path / "table.csv"
    table.write_text("".join(f"{row.replace(' ', ',')}\n" for row in rows))
    training = Training(models.SharesInside, partial(models.vectors, (8, 8)), torch.float64)
    outcome = run(pool, training, Layout(2, 1, 2, str(table), num_microbatches=2))
    assert_close(outcome.weights, plain(pool, training).weights, 1e-10)


BF16 = [Layout(2, 1, 1, "zbv"), Layout(2, 1, 2, "interleaved-zb")]


@pytest.mark.parametrize("layout", covered(BF16, by=BF16[:1]), ids=str)
def test_bf16_mixed(pool: Pool, layout: Layout) -> None:
    """Each micro-batch's gradients are bit-equal; only the order of their sum differs."""
    outcome, expected = run(pool, MIXED, layout), by_hand(pool, MIXED, layout.data)
    assert_first_gradients(outcome, expected)


def assert_first_gradients(outcome: Outcome, expected: Outcome) -> None:
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    assert_close(outcome.gradients, expected.gradients, 1e-6 * largest)


def test_conv1d_layers_of_hugging_face(pool: Pool) -> None:
    padded = partial(models.padded, (8, 8, 8, 8))
    double = Training(models.gpt2, padded, torch.float64, accumulate=2, clip=0.1, loss_weight="tokens")
    outcome = run(pool, double, Layout(2, 1, 1, "zbv"))
    assert_close(outcome.weights, by_hand(pool, double).weights, 1e-10)
