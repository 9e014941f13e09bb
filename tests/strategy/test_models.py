"""Models that users really write train as in one process, unmodified, over two ranks."""

from functools import partial

import pytest
import torch

from tests.harness import models
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.running import Layout, Training, assert_bit_equal, assert_close, run
from tests.strategy import odd_models as odd

DOUBLE = torch.float64
VECTORS = partial(models.vectors, (8, 8, 6))
PADDED = partial(models.padded, (8, 8))
WAVE = Layout(2, 2, 1)

MODELS = {
    kind.__name__: kind
    for kind in (
        odd.CheckpointedInside, odd.CheckpointedOutside, odd.FrozenBelow, odd.FrozenAbove, odd.Auxiliary,
        odd.Dictionaries, odd.InPlace, odd.LearnedSideInput, odd.Sequence, odd.ReturnsMore,
    )
}  # fmt: skip
FOREIGN = {
    f"{name} checkpointed {'re-entrant' if reentrant else 'anew'}": partial(
        odd.activation_checkpointed, name, reentrant
    )
    for name in ("gpt2", "llama")
    for reentrant in (False, True)
} | {"hidden states asked for": odd.hidden_states, "looked into before": odd.ran_before}
OPTIMIZERS = {
    "Adagrad": {"lr": 1e-2}, "Rprop": {"lr": 1e-2}, "SGD": {"lr": 1e-2, "momentum": 0.9}, "NAdam": {"lr": 1e-3},
    "AdamW": {"lr": 1e-3, "fused": True}, "RMSprop": {"lr": 1e-3, "centered": True},
}  # fmt: skip


@pytest.mark.parametrize("layout", [WAVE, Layout(2, 1, 1, "1f1b")], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_trains_as_in_one_process(pool: Pool, kind: str, layout: Layout) -> None:
    training = Training(MODELS[kind], VECTORS, DOUBLE, steps=3, clip=0.1)
    assert_close(run(pool, training, layout).weights, plain(pool, training).weights, 1e-10)


@pytest.mark.parametrize("kind", FOREIGN)
def test_transformers(pool: Pool, kind: str) -> None:
    training = Training(FOREIGN[kind], PADDED, DOUBLE, steps=3, loss_weight="tokens")
    assert_close(run(pool, training, WAVE).weights, by_hand(pool, training).weights, 1e-10)


def test_parameters_unused_on_some_data_ranks(pool: Pool) -> None:
    training = Training(odd.Unused, partial(models.vectors, (16, 16)), steps=1)
    expected = by_hand(pool, Training(odd.Unused, partial(models.vectors, (16, 16)), steps=1))
    assert "never" not in expected.gradients
    outcome = run(pool, training, Layout(2, 1, 2))
    assert set(outcome.gradients) == set(expected.gradients)
    assert_bit_equal({"never": outcome.weights["never"]}, {"never": torch.ones(3)})


def test_dropout_and_batch_norm_train(pool: Pool) -> None:
    outcome = run(pool, Training(odd.Noisy, partial(models.vectors, (8, 8))), WAVE)
    assert all(weight.isfinite().all() for weight in outcome.weights.values())
    assert len(outcome.losses) == 5 and max(outcome.losses) < 10


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(pool: Pool, kind: str) -> None:
    training = Training(partial(odd.Optimized, kind, **OPTIMIZERS[kind]), VECTORS, DOUBLE, steps=3)
    assert_close(run(pool, training, Layout(2, 1, 1)).weights, plain(pool, training).weights, 1e-10)
