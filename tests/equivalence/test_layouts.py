"""Every layout under every schedule trains as one process does.

              gpipe  1f1b  interleaved  hanayo
(2, 1, 1)       x      x        x         x
(2, 2, 1)                                 x        (P, W, D); only wave schedules have W > 1
(4, 1, 1)       x      x        x         x
(2, 1, 2)       x      x        x         x
(1, 1, 2)              x                           the full model on each data rank

By default each size and each schedule is run at least once; `tox -e thorough` runs the rest of the table.
"""

from functools import partial

import pytest
import torch

from tests.harness import models
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_bit_equal, assert_close, assert_same_training, run

TWICE = Layout(2, 1, 2)
SIZES = ((2, 1, 1), (4, 1, 1), (2, 1, 2))
LOOPS = ("gpipe", "1f1b", "interleaved")
WAVES = [Layout(2, 1, 1), Layout(2, 2, 1), Layout(4, 1, 1), Layout(2, 1, 2)]
GRID = [*WAVES, *(Layout(*size, schedule=schedule) for size in SIZES for schedule in LOOPS)]
# Each size and each schedule at least once, for the slower models and for comparisons with a tolerance.
COVER = [*WAVES[1:3], Layout(2, 1, 1, "1f1b"), Layout(2, 1, 1, "gpipe"), Layout(2, 1, 2, "interleaved")]

BATCHES = partial(models.vectors, (8, 8, 8, 8))
MLP = Training(models.MLP, BATCHES, clip=0.1)
MLP_SUMMED = Training(models.MLP, BATCHES, accumulate=2, clip=0.1)
MLP_UNCLIPPED = Training(models.MLP, BATCHES, accumulate=2)
MLP_DOUBLE = Training(models.MLP, BATCHES, torch.float64, accumulate=2, clip=0.1)
WINDOWS = partial(models.windows, (8, 8, 8, 8))
GPT = Training(models.gpt, WINDOWS, accumulate=2, clip=0.1)
GPT_DOUBLE = Training(models.gpt, WINDOWS, torch.float64, accumulate=2, clip=0.1)


@pytest.mark.parametrize("layout", covered([Layout(2, 2, 1), Layout(4, 1, 1, "1f1b"), TWICE], by=[TWICE]), ids=str)
def test_mlp_in_double_precision(pool: Pool, layout: Layout) -> None:
    assert_close(run(pool, MLP_DOUBLE, layout).weights, plain(pool, MLP_DOUBLE).weights, 1e-10)


@pytest.mark.parametrize("layout", covered(GRID, by=COVER), ids=str)
def test_mlp_is_bit_equal(pool: Pool, layout: Layout) -> None:
    outcome = run(pool, MLP_UNCLIPPED, layout)
    assert_same_training(outcome, plain(pool, MLP_UNCLIPPED))
    expected = by_hand(pool, MLP_UNCLIPPED, layout.data)
    assert_bit_equal(outcome.gradients, expected.gradients)
    assert_bit_equal(outcome.weights, expected.weights)


@pytest.mark.parametrize("training", [MLP, MLP_SUMMED], ids=["each", "summed"])
@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(2, 1, 2)], ids=str)
def test_clipped_mlp_is_bit_equal(pool: Pool, layout: Layout, training: Training) -> None:
    assert_bit_equal(run(pool, training, layout).weights, by_hand(pool, training, layout.data).weights)


@pytest.mark.parametrize("layout", covered(COVER, by=[COVER[4]]), ids=str)
def test_gpt_with_tied_embedding(pool: Pool, layout: Layout) -> None:
    outcome, expected = run(pool, GPT_DOUBLE, layout), plain(pool, GPT_DOUBLE)
    assert_same_training(outcome, expected)
    assert_close(outcome.weights, expected.weights, 1e-10)


def test_gradients_of_a_tied_embedding_that_are_added_at_once(pool: Pool) -> None:
    """In another order than in one process, so equal within a tolerance; it trains in double precision."""
    layout = Layout(2, 1, 1, tied_gradients="at_once")
    assert_close(run(pool, GPT_DOUBLE, layout).weights, plain(pool, GPT_DOUBLE).weights, 1e-10)


@pytest.mark.parametrize(
    "layout",
    covered([Layout(2, 1, 1), Layout(2, 1, 1, "1f1b"), Layout(1, 1, 2, "1f1b")], by=[Layout(2, 1, 1)]),
    ids=str,
)
def test_gpt_is_bit_equal(pool: Pool, layout: Layout) -> None:
    """Including the tied weight: for each micro-batch, the gradients of head and embedding are added first."""
    outcome, expected = run(pool, GPT, layout), by_hand(pool, GPT, layout.data)
    assert_same_training(outcome, plain(pool, GPT))
    assert_bit_equal(outcome.gradients, expected.gradients)
    assert_bit_equal(outcome.weights, expected.weights)
