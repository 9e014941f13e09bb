"""The two references, an ordinary Trainer and the hand-written loop, agree with each other."""

from functools import partial

import pytest
import torch

from tests.harness import models
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Training, assert_close, assert_same_training

KINDS = {
    "mlp": (models.MLP, models.vectors, "samples"),
    "frozen": (models.Frozen, models.vectors, "samples"),
    "skip": (models.Skip, models.vectors, "samples"),
    "regularised": (models.Regularised, models.vectors, "samples"),
    "gpt": (models.gpt, models.windows, "samples"),
    "masked": (models.Masked, models.texts, "tokens"),
    "gpt2": (models.gpt2, models.padded, "tokens"),
    "llama": (models.llama, models.padded, "tokens"),
    "bert": (models.bert, models.padded, "tokens"),
}


@pytest.mark.parametrize("kind", covered(KINDS, by=["frozen", "regularised", "masked", "llama"]))
def test_whole_batches_and_microbatches_agree(pool: Pool, kind: str) -> None:
    model, batches, weight = KINDS[kind]
    training = Training(model, partial(batches, (8, 8, 8, 11)), accumulate=2, clip=0.1, loss_weight=weight)
    assert_same_training(by_hand(pool, training), plain(pool, training))


@pytest.mark.parametrize("kind", ["mlp", "gpt", "masked"])
def test_references_agree_in_double_precision(pool: Pool, kind: str) -> None:
    model, batches, weight = KINDS[kind]
    training = Training(
        model, partial(batches, (8, 8, 8, 11)), torch.float64, accumulate=2, clip=0.1, loss_weight=weight
    )
    assert_close(by_hand(pool, training).weights, plain(pool, training).weights, 1e-10)


@pytest.mark.parametrize("kind", ["mlp", "masked"])
def test_references_agree_on_data_ranks(pool: Pool, kind: str) -> None:
    model, batches, weight = KINDS[kind]
    training = Training(model, partial(batches, (8, 8, 8)), torch.float64, accumulate=2, clip=0.1, loss_weight=weight)
    assert_close(by_hand(pool, training, data=2).weights, plain(pool, training).weights, 1e-10)
    assert_same_training(by_hand(pool, training, data=2), plain(pool, training))
