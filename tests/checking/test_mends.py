"""The check finds what the package prevents: with each protection switched off, it names what differs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchRule
from lightning_hanayo.pipeline_parallel.capture.carriers import NO_CARRIERS
from tests.checking.verdicts import Break, verdict_of
from tests.habits.step_state import Annealed
from tests.harness import models
from tests.harness.models import NUM_BLOCKS, WIDTH, Batch
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout

WAVE = Layout(2, 1, 1)
VECTORS = models.vectors((8, 8, 6, 8))


class StoringBlock(models.Block):
    def __init__(self) -> None:
        super().__init__()
        self.aux_loss: Any = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.aux_loss = x.square().mean()
        return x


class AddsStored(models.MLP):
    """Blocks store a loss of their own, which the step adds as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StoringBlock() for _ in range(NUM_BLOCKS))

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + 0.1 * sum(float(block.aux_loss) for block in self.blocks)


class Clips(models.MLP):
    """Clips by the norm of all gradients, with a function imported by name."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.01)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ScalesByNorm(models.MLP):
    """Divides all gradients by the norm of them all, of which a rank has only its own."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient /= norm

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SequenceFirst(models.MLP):
    """Its samples are in dimension 1."""

    def loss(self, batch: Batch) -> Tensor:
        return self(batch["x"].cumsum(0)[-1]).square().mean()


@contextmanager
def without_carriers() -> Iterator[None]:
    with patch("lightning_hanayo.strategy.setup.build_pipeline.RankBuilder.carriers", lambda _: NO_CARRIERS):
        yield


@contextmanager
def without_whole_norms() -> Iterator[None]:
    with patch("lightning_hanayo.strategy.norms._run_of", lambda *_: None):
        yield


@contextmanager
def without_guard() -> Iterator[None]:
    with patch("lightning_hanayo.strategy.guarded_hooks.guard_hooks", lambda *_, **__: None):
        yield


@contextmanager
def without_batch_dim() -> Iterator[None]:
    with patch.object(BatchRule, "sample_dim", lambda rule, ndim: 0):
        yield


CUBE = Layout(1, 1, 1, cube=(1, 2, 1))
CASES: dict[str, tuple[type[LightningModule], Layout, str, Break, str]] = {
    "what blocks store": (AddsStored, WAVE, "exact", without_carriers, "the loss of batch 0"),
    "what the step sets": (Annealed, WAVE, "exact", without_carriers, "the loss of batch 1"),
    "norms of the whole model": (Clips, WAVE, "exact", without_whole_norms, "the weight of"),
    "a loop over gradients of other ranks": (ScalesByNorm, WAVE, "refused", without_guard, "the weight of"),
    "a loop over parts of gradients": (ScalesByNorm, CUBE, "refused", without_guard, "the weight of"),
}


@pytest.mark.parametrize("name", covered(CASES, by=["what blocks store"]))
def test_what_is_no_longer_prevented_is_found(pool: Pool, name: str) -> None:
    factory, layout, outcome, break_, first = CASES[name]
    assert verdict_of(pool, factory, VECTORS, layout).outcome == outcome
    verdict = verdict_of(pool, factory, VECTORS, layout, break_)
    assert verdict.outcome == "differs", verdict.summary
    assert first in verdict.summary, verdict.summary


def test_a_batch_that_is_cut_wrong_is_found(pool: Pool) -> None:
    batches = [{"x": torch.randn(8, 8, WIDTH)} for _ in range(2)]
    check = partial(verdict_of, pool, SequenceFirst, batches, WAVE, batch_dim=1, step="microbatch")
    assert check().outcome == "exact"
    verdict = check(without_batch_dim)
    assert (verdict.outcome, verdict.exit_code) == ("depends on micro-batches", 1)
    assert "micro-batches change your loss by" in verdict.summary
