"""Causal models of transformers with a chunked loss train as they do with their own."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lightning_hanayo import chunk_loss
from lightning_hanayo.chunked_loss.cross_entropy import Logits
from lightning_hanayo.errors import UnsupportedError
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout, Training, assert_same_training, run


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
    assert "made when they are used" in repr(found.logits) and not found.logits.is_made
    assert found.logits.shape == expected.logits.shape and found.logits.dtype is torch.float32
    assert found.logits.device == expected.logits.device
    assert found.logits.contiguous() is found.logits and not found.logits.is_made
    torch.testing.assert_close(found.loss, expected.loss)
    expected.loss.backward()
    found.loss.backward()
    for (name, parameter), other in zip(chunked.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)
    torch.testing.assert_close(found.logits.argmax(-1), expected.logits.argmax(-1))
    torch.testing.assert_close(found.logits + 0, expected.logits)
    torch.testing.assert_close(found.logits.type(torch.float64), expected.logits.double())
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


@pytest.mark.parametrize("make", [partial(models.gpt2, 2, 4), partial(models.llama, 2, 1, 2)], ids=["gpt2", "llama"])
def test_trains_on_a_pipeline_and_in_a_cube(pool: Pool, make: partial[LightningModule]) -> None:
    """Tied weights and others; weights of micro-batches are compared with what the loss is a mean of."""
    batches = partial(models.padded, (8, 8))
    layout = Layout(2, 1, 1) if make.func is models.gpt2 else Layout(cube=(2, 1, 1))
    own = Training(make, batches, loss_weight="tokens", steps=2)
    ours = Training(partial(chunked, make), batches, loss_weight="tokens", steps=2)
    assert_same_training(run(pool, ours, layout), run(pool, own, layout))


def test_other_models_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^chunk_loss: Linear has the head NoneType"):
        chunk_loss(nn.Linear(2, 2))
    model = build(models.llama, 5)
    with pytest.raises(UnsupportedError, match="chunked_cross_entropy in your step"):
        chunk_loss(model)
