"""A step that one rank skips is skipped by all, and Lightning's counters go on. The catalog has more cases."""

from typing import Any

import pytest
import torch

from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout, assert_close, make_loader, make_trainer, own_weights

PIPELINE = Layout(2, 1, 1)


class Skips(models.MLP):
    """Skips the second step on the last rank, and the third one on the first, each in another way."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        rank, last = self.global_rank, self.trainer.world_size - 1
        if self.global_step == 1:
            optimizer_closure()
            if rank != last:
                optimizer.step()
        elif self.global_step == 2 and rank == 0:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class StepsBehind(models.MLP):
    """Steps the optimizer under Lightning's, on one rank."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        if self.global_rank == 0:
            optimizer.optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # has no states, which a hook can't use


def fit(layout: Layout, kind: type[models.MLP]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """This rank's weights, and what is counted."""
    trainer = make_trainer(layout, max_steps=5, accumulate_grad_batches=2, gradient_clip_val=0.1)
    module = models.build(kind, torch.float64)
    trainer.fit(module, make_loader(models.vectors((8,) * 10, torch.float64)))
    (optimizer,) = trainer.optimizers
    counts = {
        "steps": trainer.global_step,
        "progress": trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict(),
        "rate": optimizer.param_groups[0]["lr"],
        "updates": max(int(state["step"]) for state in optimizer.state.values()),
    }
    return own_weights(module), counts


def test_all_ranks_skip_and_count_alike(pool: Pool) -> None:
    ((weights, counts),) = pool.run(1, fit, Layout(), Skips)
    assert counts["steps"] == 5 and counts["updates"] == 3
    ranks = pool.run(2, fit, PIPELINE, Skips)
    assert [ours for _, ours in ranks] == [counts, counts]
    assert_close({**ranks[0][0], **ranks[1][0]}, weights, 1e-10)


def test_steps_behind_lightnings_back_are_an_error(pool: Pool) -> None:
    with pytest.raises(RunFailed, match=r"has stepped the optimizer \[1, 0\] times on ranks 0 to 1"):
        pool.run(2, fit, PIPELINE, StepsBehind)
