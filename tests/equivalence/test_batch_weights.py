"""Cubes that gather their weights once a batch, and reduce-scatter the gradients once, train as one process does."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.equivalence.test_cube import EVEN, MODELS, UNEVEN, LayerDrop, SharedLayer, training
from tests.harness import models
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_bit_equal, assert_close, run

LAYOUTS = (
    Layout(cube=(2, 1, 1), weights="batch"),
    Layout(2, 1, 1, "1f1b", cube=(2, 1, 1), weights="batch"),
    Layout(2, 2, 1, "hanayo-zb", cube=(2, 1, 1), weights="batch"),
    Layout(cube=(2, 2, 2), weights="batch"),
)
CASES = [(kind, layout, data) for kind in MODELS for layout in LAYOUTS[::3] for data in (EVEN, UNEVEN)]
CASES = [case for case in CASES if case[0] != "mixer" or case[2] is EVEN]  # its blocks take one length
COVERED = [("gpt", LAYOUTS[0], UNEVEN), ("mixer", LAYOUTS[0], EVEN)]


@pytest.mark.parametrize(("kind", "layout", "data"), covered(CASES, by=COVERED), ids=str)
def test_every_kind_of_block_trains_as_in_one_process(pool: Pool, kind: str, layout: Layout, data: tuple) -> None:
    single = training(kind, data)
    outcome, expected = run(pool, single, layout), plain(pool, single)
    assert_close(outcome.gradients, expected.gradients, MODELS[kind][2])
    assert_close(outcome.weights, expected.weights, MODELS[kind][2])


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_pipelines_with_accumulation(pool: Pool, layout: Layout) -> None:
    model, batches = partial(models.gpt, 4, 4 * layout.waves), partial(models.texts, (8, 8, 8, 8), (7,))
    single = Training(model, batches, torch.float64, steps=2, accumulate=2, clip=0.1, loss_weight="tokens")
    assert_close(run(pool, single, layout).weights, by_hand(pool, single, data=layout.data).weights, 1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_pairs_train_bit_for_bit_as_one_by_one(pool: Pool, layout: Layout) -> None:
    model = partial(models.gpt, 4, 4)
    single = Training(model, partial(models.texts, (8,) * 4), torch.float64, steps=4, loss_weight="tokens")
    paired = run(pool, single, replace(layout, pairs=True))
    assert_bit_equal(paired.weights, run(pool, single, layout).weights)


@pytest.mark.parametrize("model", [SharedLayer, LayerDrop], ids=lambda model: model.__name__)
def test_layers_that_are_used_twice_or_only_sometimes(pool: Pool, model: type[models.MLP]) -> None:
    single = Training(model, partial(models.vectors, (8, 8, 8)), torch.float64, steps=3)
    kept, again = (run(pool, single, replace(LAYOUTS[0], weights=weights)) for weights in ("batch", "microbatch"))
    assert_close(kept.weights, again.weights, 1e-12)
    if model is SharedLayer:
        assert_close(kept.weights, plain(pool, single).weights, 1e-10)
