"""Models that users really write train as in one process, unmodified, over two ranks."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule
from torch import Tensor

from tests.harness import models
from tests.harness.models import Batch
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Training,
    assert_bit_equal,
    assert_close,
    make_loader,
    make_trainer,
    merge_owned,
    own_weights,
    run,
)
from tests.strategy import odd_models as odd

DOUBLE = torch.float64
VECTORS = partial(models.vectors, (8, 8, 6))
PADDED = partial(models.padded, (8, 8))
WAVE, LINE = Layout(2, 2, 1), Layout(2, 1, 1, "1f1b")

MODELS = {
    kind.__name__: kind
    for kind in (
        odd.CheckpointedInside, odd.CheckpointedOutside, odd.FrozenBelow, odd.FrozenAbove, odd.Auxiliary,
        odd.Dictionaries, odd.InPlace, odd.LearnedSideInput, odd.Sequence, odd.ReturnsMore, odd.ReadsGradients,
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


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_cube_on_one_pipeline_rank_without_waves(pool: Pool, num_microbatches: int) -> None:
    training = Training(models.MLP, VECTORS, DOUBLE, steps=2)
    cube = Layout(1, "auto", 1, "auto", cube=(1, 2, 1), num_microbatches=num_microbatches)  # type: ignore[arg-type]
    assert_close(run(pool, training, cube).weights, plain(pool, training).weights, 1e-10)


def test_a_step_reads_the_gradients_that_accumulate(pool: Pool) -> None:
    training = Training(odd.ReadsGradients, VECTORS, DOUBLE, steps=2, accumulate=2)
    assert_close(run(pool, training, WAVE).weights, plain(pool, training).weights, 1e-10)


@pytest.mark.parametrize(
    ("kind", "layout"),
    covered(product(MODELS, [WAVE, LINE]), by=[*product(list(MODELS)[::3], [WAVE]), ("Sequence", LINE)]),
    ids=str,
)
def test_trains_as_in_one_process(pool: Pool, kind: str, layout: Layout) -> None:
    training = Training(MODELS[kind], VECTORS, DOUBLE, steps=3, clip=0.1)
    assert_close(run(pool, training, layout).weights, plain(pool, training).weights, 1e-10)


@pytest.mark.parametrize("kind", covered(FOREIGN, by=["looked into before"]))
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
    assert len(outcome.losses) == 3 and max(outcome.losses) < 10


@pytest.mark.parametrize("kind", covered(OPTIMIZERS, by=["Adagrad"]))
def test_optimizers(pool: Pool, kind: str) -> None:
    training = Training(partial(odd.Optimized, kind, **OPTIMIZERS[kind]), VECTORS, DOUBLE, steps=3)
    assert_close(run(pool, training, Layout(2, 1, 1)).weights, plain(pool, training).weights, 1e-10)


class Outputs(Callback):
    """What Lightning hands to callbacks as the step's outputs."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs)


def one_element(model: type[LightningModule], layout: Layout) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    outputs = Outputs()
    trainer = make_trainer(layout, max_epochs=1, accumulate_grad_batches=2, callbacks=[outputs])
    module = models.build(model, DOUBLE)
    trainer.fit(module, make_loader(models.vectors((4, 3, 8), DOUBLE)))
    return own_weights(module), outputs.seen


@pytest.mark.parametrize("model", [odd.LossOfOneElement, odd.LossOfOneElementInADictionary])
def test_a_loss_of_one_element_is_no_sample(pool: Pool, model: type[LightningModule]) -> None:
    """Micro-batches of one sample and of two."""
    ((weights, outputs),) = pool.run(1, one_element, model, Layout())
    ranks = pool.run(2, one_element, model, WAVE)
    assert_close(merge_owned([own for own, _ in ranks]), weights, 1e-10)
    torch.testing.assert_close(ranks[0][1], outputs, rtol=0, atol=1e-10)


def as_defaultdict(batch: Batch) -> Any:
    return defaultdict(list, batch, more=UserDict(y=batch["y"]))


def as_text_batch(batch: Batch) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding(batch)


def mappings(convert: Callable[[Batch], Any], layout: Layout) -> tuple[dict[str, Tensor], Any]:
    batches = [convert(batch) for batch in models.vectors((8, 5), DOUBLE)]
    trainer = make_trainer(layout, max_epochs=1)
    module = models.build(odd.Predicts, DOUBLE)
    trainer.fit(module, make_loader(batches))
    return own_weights(module), trainer.predict(module, make_loader(batches))


@pytest.mark.parametrize("convert", covered([as_defaultdict, OrderedDict, UserDict, as_text_batch], by=[UserDict]))
def test_batches_that_are_mappings(pool: Pool, convert: Callable[[Batch], Any]) -> None:
    ((weights, predicted),) = pool.run(1, mappings, convert, Layout())
    ranks = pool.run(2, mappings, convert, WAVE)
    assert_close(merge_owned([own for own, _ in ranks]), weights, 1e-10)
    for ours, alone in zip(ranks[0][1], predicted, strict=True):
        assert type(ours) is type(alone) and list(ours) == list(alone)
        torch.testing.assert_close(ours["x"], alone["x"], rtol=0, atol=1e-10)
