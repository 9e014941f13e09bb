"""User code runs in the mode that `Trainer(inference_mode=...)` names, on all ranks, and training goes on after it."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, data_rank, make_loader, make_strategy, make_trainer

LAYOUTS = {
    "one rank": Layout(1, 1, 1),
    "data": Layout(1, 1, 2),
    "pipeline": Layout(2, 1, 1),
    "pipelines": Layout(2, 1, 2),
    "cube": Layout(1, 1, 1, cube=(1, 2, 1)),
    "cube and pipeline": Layout(2, 1, 1, cube=(1, 2, 1)),
}
SEEN: dict[str, set[bool]] = {}


def see(where: str) -> None:
    SEEN.setdefault(where, set()).add(torch.is_inference_mode_enabled())


class SeeingBlock(models.Block):
    def forward(self, x: Tensor) -> Tensor:
        see("block")
        return super().forward(x)


class Seeing(models.MLP):
    """Says in which mode its code runs; keeps in buffers, metrics and lists what steps compute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SeeingBlock() for _ in range(4))
        self.mean = MeanMetric()
        self.register_buffer("last", torch.zeros(models.CLASSES))
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        see("step")
        loss = self.loss(batch)
        self.mean.update(loss)
        self.last = self(batch["x"]).mean(0)
        self.outputs.append(loss)
        self.log("loss", loss, sync_dist=True)
        self.log("mean", self.mean)
        return loss

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        see("hook")
        self.log("total", torch.stack(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        see("step")
        return self(batch["x"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def evaluate(layout: Layout | None, inference: bool) -> tuple[dict[str, set[bool]], list[dict[str, float]], Any]:
    """Evaluate, train, and evaluate again; None: with a plain Trainer."""
    for message in ("many workers", "DistributedSampler`", "no `val_dataloader`", "_no_grad"):
        warnings.filterwarnings("ignore", message=f".*{message}")
    SEEN.clear()
    rank, size = (0, 1) if layout is None else (data_rank(layout), layout.data)
    batches = [{key: value[rank::size] for key, value in one.items()} for one in models.vectors((8, 8))]
    strategy = {} if layout is None else {"strategy": make_strategy(layout)}
    trainer = make_trainer(layout or Layout(), inference_mode=inference, max_epochs=1, **strategy)
    module, loader = models.build(Seeing), make_loader(batches)
    found = [*trainer.validate(module, loader, verbose=False), *trainer.test(module, loader, verbose=False)]
    predicted = trainer.predict(module, loader)
    seen = {where: set(modes) for where, modes in SEEN.items()}
    trainer.fit(module, loader)
    found += trainer.validate(module, loader, verbose=False)
    return seen, found, [one.clone() for one in predicted if isinstance(one, Tensor)]


CASES = [(layout, inference) for layout in LAYOUTS for inference in (True, False)]


@pytest.mark.parametrize(("layout", "inference"), covered(CASES, by=[("pipeline", True)]))
def test_evaluation_runs_in_the_mode_that_was_asked_for(pool: Pool, layout: str, inference: bool) -> None:
    ((_, metrics, predictions),) = pool.run(1, evaluate, None, inference)
    ranks = pool.run(LAYOUTS[layout].world_size, evaluate, LAYOUTS[layout], inference)
    for seen, found, _ in ranks:
        assert all(modes == {inference} for modes in seen.values()), seen
        assert found == [pytest.approx(one, rel=1e-5) for one in metrics]
    assert set(ranks[0][0]) == {"step", "block", "hook"}
    if LAYOUTS[layout].data == 1:
        torch.testing.assert_close(ranks[0][2], predictions)
