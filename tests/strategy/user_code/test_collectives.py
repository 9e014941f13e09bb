"""Collectives of user code on several data ranks: like DDP with so many processes, and nobody waits for ever."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import models
from tests.harness.models import Batch
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout, data_rank, make_loader, make_strategy, make_trainer

DATA = Layout(2, 1, 2)


class Gathers(models.MLP):
    """Gathers each loss, and collects it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.seen: dict[str, float] = {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss)
        self.log("gathered", self.all_gather(loss).mean(), on_epoch=True, sync_dist=True)  # type: ignore[union-attr]
        return loss

    def on_train_epoch_end(self) -> None:
        own = torch.stack(self.outputs).mean()
        self.log("epoch_mean", own, sync_dist=True)
        self.seen["gathered"] = float(self.all_gather(own).mean())  # type: ignore[union-attr]
        self.outputs.clear()

    def on_train_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.seen |= {name: float(metrics[name]) for name in ("gathered", "epoch_mean") if name in metrics}


class SkipsOnOne(Gathers):
    """The last data rank doesn't call it."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = models.MLP.training_step(self, batch, batch_idx)
        return loss if self.trainer.global_rank > 1 else loss + 0 * self.all_gather(loss).mean()  # type: ignore[union-attr]


class OtherShapes(Gathers):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.all_gather(torch.zeros(1 + (self.trainer.global_rank > 1)))
        return models.MLP.training_step(self, batch, batch_idx)


class SkipsAtEnd(Gathers):
    def on_train_epoch_end(self) -> None:
        if self.trainer.global_rank < 2:
            self.all_gather(torch.zeros(1))


def train(model: Any, layout: Layout, sizes: tuple[int, ...]) -> dict[str, float]:
    """`sizes` are those of the batches of data rank 0 and data rank 1."""
    warnings.filterwarnings("ignore", message="self.all_gather in training_step gathers one of the 4 micro-batches")
    module = models.build(model, torch.float64)
    batches = models.vectors((8, 8), torch.float64)
    rank = data_rank(layout)
    loader = make_loader([{k: v[4 * rank :][: sizes[rank]] for k, v in batch.items()} for batch in batches])
    trainer = make_trainer(layout, strategy=make_strategy(layout), max_epochs=1)
    trainer.fit(module, loader)
    return dict(module.seen)  # type: ignore[arg-type]


def test_all_data_ranks_gather_the_same_means(pool: Pool) -> None:
    ranks = pool.run(4, train, Gathers, DATA, (4, 4))
    for seen in ranks:
        assert seen.keys() == ranks[0].keys()
        assert all(abs(value - ranks[0]["gathered"]) < 1e-12 for value in seen.values()), seen


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (SkipsOnOne, (4, 4), "rank 2 has not called self.all_gather of float64 .* training_step, micro-batch . of 4"),
        (OtherShapes, (4, 4), r"ranks 0 and 2 call different collectives.*float32 \[1\].*float32 \[2\]"),
        (Gathers, (4, 3), "micro-batch 0 of 4.*micro-batch 0 of 3.*drop_last=True"),
        pytest.param(
            SkipsAtEnd,
            (4, 4),
            "rank . has not called self.all_gather of float32 .* in on_train_epoch_end",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_calls_that_differ_are_refused_at_once(pool: Pool, model: Any, sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(RunFailed, match=message) as failed:
        pool.run(4, train, model, DATA, sizes, timeout=30.0)
    assert [failure.rank for failure in failed.value.failures if failure.kind == "timed out"] == []
