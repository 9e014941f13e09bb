"""Irregular batches and models train as in one process: uneven or small batches, frozen parameters, skip connections.

11 samples, 4 micro-batches:   [0 1 2] [3 4 5] [6 7 8] [9 10]
"""

from functools import partial
from itertools import product

import pytest
import torch

from tests.harness import models
from tests.harness.models import IGNORED, Batch
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_bit_equal, assert_close, run

WAVE = Layout(2, 1, 1)
LAYOUTS = [Layout(2, 2, 1), Layout(2, 1, 1, "1f1b")]
ONLY_IN_WAVES = "a weight shared with the outside"  # without waves the last block is on another rank: refused
DOUBLE = torch.float64
EVEN = partial(models.vectors, (8, 8, 8))
LONGER = partial(models.texts, (8, 8, 8), lengths=(8, 12, 8))


def shifted_tokens(micro_batch: Batch) -> int:
    """The number of labels that a causal loss counts."""
    return int((micro_batch["labels"][:, 1:] != IGNORED).sum())


IRREGULAR = {
    "an uneven batch": Training(models.MLP, partial(models.vectors, (11,)), DOUBLE),
    "a smaller last batch": Training(models.MLP, partial(models.vectors, (8, 8, 5)), DOUBLE),
    "fewer samples than micro-batches": Training(models.MLP, partial(models.vectors, (8, 3, 1)), DOUBLE, steps=6),
    "a batch of longer sequences": Training(models.Masked, LONGER, DOUBLE, loss_weight="tokens"),
    "the epoch ends while accumulating": Training(models.MLP, EVEN, DOUBLE, accumulate=2, clip=0.1),
    "a frozen embedding": Training(models.Frozen, EVEN, DOUBLE, clip=0.1),
    "a skip connection": Training(models.Skip, EVEN, DOUBLE, clip=0.1),
    "a penalty on the embedding": Training(models.Regularised, EVEN, DOUBLE, clip=0.1),
    "a sum as loss": Training(models.Summed, partial(models.vectors, (8, 11)), DOUBLE, loss_weight="sum"),
    "a weight shared with the outside": Training(models.SharesOutside, EVEN, DOUBLE, clip=0.1),
    "uneven labels": Training(models.Masked, partial(models.texts, (8, 11)), DOUBLE, loss_weight="tokens"),
    "a loss_weight function": Training(
        models.gpt2, partial(models.padded, (8, 11)), DOUBLE, loss_weight=shifted_tokens
    ),
}
OTHERS = "the epoch ends while accumulating", "a skip connection", "a sum as loss"  # than those of the tests below
COVER = [*product(OTHERS, LAYOUTS[:1]), ("uneven labels", LAYOUTS[1])]
# transformers computes this loss in fp32, so the means over the batch and over micro-batches differ by this much
TOLERANCES = {"a loss_weight function": 1e-6}


@pytest.mark.parametrize(("case", "layout"), covered(product(IRREGULAR, LAYOUTS), by=COVER), ids=str)
def test_matches_training_on_the_whole_batch(pool: Pool, case: str, layout: Layout) -> None:
    if case == ONLY_IN_WAVES and layout.schedule != "hanayo":
        pytest.skip("the last block isn't on rank 0")
    training = IRREGULAR[case]
    tolerance = TOLERANCES.get(case, 1e-10)
    assert_close(run(pool, training, layout).weights, plain(pool, training).weights, tolerance)


@pytest.mark.parametrize("case", ["uneven labels", "a weight shared with the outside"])
def test_matches_on_two_data_ranks(pool: Pool, case: str) -> None:
    training = IRREGULAR[case]
    assert_close(run(pool, training, Layout(2, 1, 2)).weights, plain(pool, training).weights, 1e-10)


@pytest.mark.parametrize("case", ["an uneven batch", "fewer samples than micro-batches", "a frozen embedding"])
def test_is_bit_equal_to_the_loop(pool: Pool, case: str) -> None:
    training = IRREGULAR[case]
    assert_bit_equal(run(pool, training, WAVE).weights, by_hand(pool, training).weights)


def test_weighting_by_samples_is_not_exact_for_uneven_labels(pool: Pool) -> None:
    """`loss_weight="tokens"` is needed: without it the model of this test gets different weights."""
    exact = IRREGULAR["uneven labels"]
    approximate = Training(exact.model, exact.batches, DOUBLE, loss_weight="samples")
    gradients, expected = by_hand(pool, approximate).gradients, plain(pool, exact).gradients
    assert max((gradients[name] - expected[name]).abs().max().item() for name in expected) > 1e-3
