"""Every layout under every schedule trains as one process does.

              gpipe  1f1b  interleaved  hanayo
(2, 1, 1)       x      x        x         x
(2, 2, 1)       x      x        x         x        (P, W, D)
(4, 1, 1)       x      x        x         x
(2, 1, 2)       x      x        x         x
"""

from functools import partial

import pytest
import torch

from tests.harness import models
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.running import Layout, Training, assert_bit_equal, assert_close, assert_same_training, run

SIZES = ((2, 1, 1), (2, 2, 1), (4, 1, 1), (2, 1, 2))
SCHEDULES = ("gpipe", "1f1b", "interleaved", "hanayo")
GRID = [Layout(*size, schedule=schedule) for size in SIZES for schedule in SCHEDULES]
# Each size and each schedule at least once, the wave everywhere: what the slower models get.
COVER = [layout for index, layout in enumerate(GRID) if layout.schedule == "hanayo" or index in (1, 4, 10, 12)]

BATCHES = partial(models.vectors, (8, 8, 8, 8))
MLP = Training(models.MLP, BATCHES, clip=0.1)
MLP_SUMMED = Training(models.MLP, BATCHES, accumulate=2, clip=0.1)
MLP_UNCLIPPED = Training(models.MLP, BATCHES, accumulate=2)
MLP_DOUBLE = Training(models.MLP, BATCHES, torch.float64, accumulate=2, clip=0.1)
WINDOWS = partial(models.windows, (8, 8, 8, 8))
GPT = Training(models.gpt, WINDOWS, accumulate=2, clip=0.1)
GPT_DOUBLE = Training(models.gpt, WINDOWS, torch.float64, accumulate=2, clip=0.1)


@pytest.mark.parametrize("layout", GRID, ids=str)
def test_mlp_in_double_precision(pool: Pool, layout: Layout) -> None:
    assert_close(run(pool, MLP_DOUBLE, layout).weights, plain(pool, MLP_DOUBLE).weights, 1e-10)


@pytest.mark.parametrize("layout", GRID, ids=str)
def test_mlp_to_the_last_bit(pool: Pool, layout: Layout) -> None:
    outcome = run(pool, MLP_UNCLIPPED, layout)
    assert_same_training(outcome, plain(pool, MLP_UNCLIPPED))
    expected = by_hand(pool, MLP_UNCLIPPED, layout.data)
    assert_bit_equal(outcome.gradients, expected.gradients)
    assert_bit_equal(outcome.weights, expected.weights)


@pytest.mark.parametrize("training", [MLP, MLP_SUMMED], ids=["each", "summed"])
@pytest.mark.parametrize("layout", [GRID[3], GRID[15]], ids=str)
def test_clipped_mlp_to_the_last_bit(pool: Pool, layout: Layout, training: Training) -> None:
    assert_bit_equal(run(pool, training, layout).weights, by_hand(pool, training, layout.data).weights)


@pytest.mark.parametrize("layout", COVER, ids=str)
def test_gpt_with_tied_embedding(pool: Pool, layout: Layout) -> None:
    assert_same_training(run(pool, GPT, layout), plain(pool, GPT))
    assert_close(run(pool, GPT_DOUBLE, layout).weights, plain(pool, GPT_DOUBLE).weights, 1e-10)


def test_untied_gradients_of_gpt_to_the_last_bit(pool: Pool) -> None:
    """The tied weight alone sums its two parts, head's and embedding's, in another order than one backward does."""
    outcome, expected = run(pool, GPT, GRID[3]), by_hand(pool, GPT)
    ours, theirs = dict(outcome.gradients), dict(expected.gradients)
    tied = "token.weight"
    assert_close({tied: ours.pop(tied)}, {tied: theirs.pop(tied)}, 1e-6)
    assert_bit_equal(ours, theirs)
