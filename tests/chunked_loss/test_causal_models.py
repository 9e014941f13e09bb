"""Causal models of transformers with a chunked loss train as they do with their own."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hanayo import chunk_loss
from lightning_hanayo.chunked_loss.causal_models import Logits
from lightning_hanayo.errors import UnsupportedError
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Training,
    assert_close,
    assert_same_training,
    make_loader,
    make_strategy,
    make_trainer,
    run,
)


def batch() -> dict[str, Tensor]:
    (found,) = models.padded((4,))
    return found


def build(make: Callable[[], LightningModule], chunk: int | None) -> Any:
    module: Any = models.build(make)
    return module.model if chunk is None else chunk_loss(module.model, chunk)


@pytest.mark.parametrize("make", [models.llama, models.gpt2])
def test_loss_gradients_and_logits_are_the_models_own(make: Callable[[], LightningModule]) -> None:
    own, chunked = build(make, None), build(make, 5)
    expected, found = own(**batch()), chunked(**batch())
    assert isinstance(found.logits, Logits) and not found.logits.is_made
    assert found.logits.shape == expected.logits.shape and found.logits.dtype is torch.float32
    assert found.logits.device == expected.logits.device
    torch.testing.assert_close(found.loss, expected.loss)
    expected.loss.backward()
    found.loss.backward()
    for (name, parameter), other in zip(chunked.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)
    torch.testing.assert_close(found.logits.argmax(-1), expected.logits.argmax(-1))
    torch.testing.assert_close(found.logits + 0, expected.logits)
    assert torch.equal(copy.deepcopy(found.logits), found.logits.whole())
    ids = {name: value for name, value in batch().items() if name != "labels"}
    torch.testing.assert_close(chunked(**ids).logits[:, -1], own(**ids).logits[:, -1])


def test_sums_over_items_are_the_models_own() -> None:
    losses = [build(models.llama, chunk)(**batch(), num_items_in_batch=7).loss for chunk in (None, 3)]
    torch.testing.assert_close(*losses)


def chunked(make: Callable[[], Any]) -> LightningModule:
    module = make()
    module.model = chunk_loss(module.model, 8)
    return module


@pytest.mark.parametrize("make", [models.gpt2, models.llama])
def test_trains_on_a_pipeline_and_in_a_cube(pool: Pool, make: Callable[[], LightningModule]) -> None:
    """Tied weights and others; weights of micro-batches are compared with what the loss is a mean of."""
    batches = partial(models.padded, (8, 8))
    layout = Layout(2, 1, 1) if make is models.gpt2 else Layout(cube=(2, 1, 1))
    own = Training(make, batches, loss_weight="tokens", steps=2)
    ours = Training(partial(chunked, make), batches, loss_weight="tokens", steps=2)
    assert_same_training(run(pool, ours, layout), run(pool, own, layout))


def test_other_models_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^chunk_loss: Linear has the head NoneType"):
        chunk_loss(nn.Linear(2, 2))
    model = build(models.llama, 5)
    with pytest.raises(UnsupportedError, match="chunked_cross_entropy in your step"):
        chunk_loss(model)


def llama() -> LightningModule:
    """With as many heads of keys as a cube divides."""
    return models.llama(2, 2)


LONG = [Layout(cube=(2, 1, 1), outside="replicate"), Layout(2, 1, 1, cube=(1, 2, 1), outside="replicate")]
LONG += [Layout(cube=(2, 2, 1), outside="replicate"), Layout(1, 1, 2, cube=(1, 1, 2), outside="replicate")]


@pytest.mark.parametrize(
    ("make", "layout"),
    covered(list(product([models.gpt2, llama], LONG)), by=[(models.gpt2, LONG[1]), (llama, LONG[2])]),
    ids=str,
)
def test_ranks_of_a_cube_share_the_tokens_of_one_sequence(
    pool: Pool, make: Callable[[], LightningModule], layout: Layout
) -> None:
    """Each micro-batch has one sequence, of 7 tokens, which no number of ranks divides; head and embedding are tied."""
    batches = partial(models.texts, (4, 4), lengths=(7,))
    training = Training(partial(chunked, make), batches, torch.float64, loss_weight="tokens", steps=2)
    ours, alone = run(pool, training, layout), run(pool, training, Layout(pipe=2, data=layout.data))
    tolerance = 1e-12 if make is models.gpt2 else 1e-7  # transformers computes Llama's norms in fp32
    assert_close(ours.weights, alone.weights, tolerance)
    assert_close(ours.gradients, alone.gradients, tolerance)


def largest_logits(layout: Layout) -> int:
    """The most elements of a tensor with a column per entry of the vocabulary, but for the transposed weight."""
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(made):
                is_logits = isinstance(tensor, Tensor) and tensor.shape[-1:] == (models.VOCABULARY,)
                if is_logits and not tensor.is_meta and tensor.shape != (models.WIDTH, models.VOCABULARY):
                    largest[0] = max(largest[0], tensor.numel())
            return made

    trainer = make_trainer(layout, strategy=make_strategy(layout, loss_weight="tokens"), max_steps=1)
    with Watch():
        trainer.fit(models.build(partial(chunked, llama)), make_loader(models.texts((1,), lengths=(32,))))
    return largest[0]


def test_a_rank_makes_logits_of_its_tokens_alone(pool: Pool) -> None:
    layout = Layout(cube=(2, 1, 2), outside="replicate", num_microbatches=1)
    assert pool.run(4, largest_logits, layout) == [32 // 4 * models.VOCABULARY] * 4
