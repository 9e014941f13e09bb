"""Unmodified models of transformers, and a stack like Gemma's, train as in one process."""

from functools import partial

import pytest
import torch

from tests.harness import models
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_bit_equal, assert_close, assert_same_training, run

MODELS = {
    "gpt2": (models.gpt2, models.padded),
    "llama": (models.llama, models.padded),
    "bert": (models.bert, models.padded),
    "masked": (models.Masked, models.texts),
}
LAYOUTS = [
    Layout(2, 1, 1),
    Layout(2, 2, 1),
    Layout(4, 1, 1, "1f1b"),
    Layout(2, 1, 1, "interleaved"),
    Layout(2, 1, 1, "gpipe"),
]
PAIRS = [(kind, layout) for kind in MODELS for layout in LAYOUTS[1 : 3 if kind != "masked" else 5]]


def training(kind: str, dtype: torch.dtype) -> Training:
    model, batches = MODELS[kind]
    return TRAININGS.setdefault(
        (kind, dtype),
        Training(model, partial(batches, (8, 8, 8, 8)), dtype, accumulate=2, clip=0.1, loss_weight="tokens"),
    )


TRAININGS: dict[tuple[str, torch.dtype], Training] = {}


@pytest.mark.parametrize("kind", covered(MODELS, by=["gpt2", "masked"]))
def test_trains_as_one_process_does(pool: Pool, kind: str) -> None:
    single = training(kind, torch.float32)
    outcome = run(pool, single, LAYOUTS[0])
    assert_same_training(outcome, plain(pool, single))
    assert_bit_equal(outcome.gradients, by_hand(pool, single).gradients)  # of the first step


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "layout"), PAIRS, ids=str)
def test_matches_the_loop_in_double_precision(pool: Pool, kind: str, layout: Layout) -> None:
    """Compared with the loop, since transformers computes its loss in fp32, in which the order of sums matters."""
    double = training(kind, torch.float64)
    assert_close(run(pool, double, layout).weights, by_hand(pool, double).weights, 1e-10)


@pytest.mark.thorough
def test_two_data_ranks(pool: Pool) -> None:
    """Data ranks have different numbers of labels, which weight their losses."""
    double = training("gpt2", torch.float64)
    assert_close(run(pool, double, Layout(2, 1, 2)).weights, by_hand(pool, double, data=2).weights, 1e-10)
