"""Batches and models that don't fit the mould: ragged, short, frozen, with a way around the stack.

11 samples, 4 micro-batches:   [0 1 2] [3 4 5] [6 7 8] [9 10]
"""

from functools import partial

import pytest
import torch

from tests.harness import models
from tests.harness.models import IGNORED, Batch
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.training import Layout, Training, assert_bit_equal, assert_close, run

WAVE = Layout(2, 1, 1)
LAYOUTS = [Layout(2, 2, 1), Layout(2, 1, 1, "1f1b")]
ONLY_IN_WAVES = "a weight shared across the border"  # in a loop the last block lies elsewhere: refused by name
DOUBLE = torch.float64
EVEN = partial(models.vectors, (8, 8, 8))
LONGER = partial(models.texts, (8, 8, 8), lengths=(8, 12, 8))


def shifted_tokens(micro_batch: Batch) -> int:
    """How many labels a causal loss counts."""
    return int((micro_batch["labels"][:, 1:] != IGNORED).sum())


AWKWARD = {
    "a ragged batch": Training(models.MLP, partial(models.vectors, (11,)), DOUBLE),
    "a smaller last batch": Training(models.MLP, partial(models.vectors, (8, 8, 5)), DOUBLE),
    "fewer samples than micro-batches": Training(models.MLP, partial(models.vectors, (8, 3, 1)), DOUBLE, steps=6),
    "a longer text in the middle": Training(models.Masked, LONGER, DOUBLE, loss_weight="tokens"),
    "the epoch ends while accumulating": Training(models.MLP, EVEN, DOUBLE, accumulate=2, clip=0.1),
    "a frozen embedding": Training(models.Frozen, EVEN, DOUBLE, clip=0.1),
    "a skip connection": Training(models.Skip, EVEN, DOUBLE, clip=0.1),
    "a regulariser outside": Training(models.Regularised, EVEN, DOUBLE, clip=0.1),
    "a sum as loss": Training(models.Summed, partial(models.vectors, (8, 11)), DOUBLE, loss_weight="sum"),
    "a weight shared across the border": Training(models.SharesOutside, EVEN, DOUBLE, clip=0.1),
    "uneven labels": Training(models.Masked, partial(models.texts, (8, 11)), DOUBLE, loss_weight="tokens"),
    "a weight of the user's": Training(
        models.gpt2, partial(models.padded, (8, 11)), DOUBLE, loss_weight=shifted_tokens
    ),
}
# transformers computes this loss in fp32: a mean over the whole batch and one over its parts differ by that much
TOLERANCES = {"a weight of the user's": 1e-6}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", AWKWARD)
def test_equals_the_whole_batch(pool: Pool, case: str, layout: Layout) -> None:
    if case == ONLY_IN_WAVES and layout.schedule != "hanayo":
        pytest.skip("the last block doesn't lie on rank 0")
    training = AWKWARD[case]
    tolerance = TOLERANCES.get(case, 1e-10)
    assert_close(run(pool, training, layout).weights, plain(pool, training).weights, tolerance)


@pytest.mark.parametrize("case", ["uneven labels", "a weight shared across the border"])
def test_data_ranks_side_by_side(pool: Pool, case: str) -> None:
    training = AWKWARD[case]
    assert_close(run(pool, training, Layout(2, 1, 2)).weights, plain(pool, training).weights, 1e-10)


@pytest.mark.parametrize("case", ["a ragged batch", "fewer samples than micro-batches", "a frozen embedding"])
def test_to_the_last_bit(pool: Pool, case: str) -> None:
    training = AWKWARD[case]
    assert_bit_equal(run(pool, training, WAVE).weights, by_hand(pool, training).weights)


def test_weighting_by_samples_is_not_exact_for_uneven_labels(pool: Pool) -> None:
    """What the option is for: without it this test's model learns something else."""
    exact = AWKWARD["uneven labels"]
    approximate = Training(exact.model, exact.batches, DOUBLE, loss_weight="samples")
    gradients, expected = by_hand(pool, approximate).gradients, plain(pool, exact).gradients
    assert max((gradients[name] - expected[name]).abs().max().item() for name in expected) > 1e-3
