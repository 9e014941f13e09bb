"""Habits: collectives in steps and in hooks."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.habits.collecting import Collects
from tests.habits.habit import EXACT, Habit, Refused, everywhere, in_cubes, on
from tests.harness import models
from tests.harness.models import Batch

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)


class Gathers(Collects):
    """Logs the mean of all ranks' losses, in the step and at the epoch's end."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("gathered", self.all_gather(loss).mean(), on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.see("epoch", self.all_gather(torch.stack(self.outputs).mean()).mean())

    def on_train_end(self) -> None:
        self.see("gathered", self.trainer.callback_metrics["gathered_epoch"])


class GathersSamples(Collects):
    """Collects the gathered scores of each batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self(batch["x"])
        loss = torch.nn.functional.cross_entropy(scores, batch["y"])
        self.log("train_loss", loss)
        gathered = self.all_gather(scores.detach())
        self.outputs.append(gathered.reshape(-1, gathered.shape[-1]))
        return loss

    def on_train_epoch_end(self) -> None:
        scores = torch.cat(self.outputs)
        self.outputs.clear()
        self.see("number", len(scores))
        self.see("largest", scores.amax())
        self.see("mean", scores.mean())


class Contrasts(Collects):
    """A loss between the samples of all ranks, with gradients to all of them."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        own = self(batch["x"])
        everybody = self.all_gather(own, sync_grads=True)
        loss = (own[:, None] - everybody.reshape(-1, own.shape[-1])[None]).square().mean()
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self) -> None: ...


class Reduces(Gathers):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = Collects.training_step(self, batch, batch_idx)
        self.log("gathered", self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean"), on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.see("epoch", self.trainer.strategy.reduce(torch.stack(self.outputs).detach().mean()))


class Synchronizes(Collects):
    """Barriers and broadcasts, and a log with sync_dist."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.trainer.strategy.barrier("step")
        scale = self.trainer.strategy.broadcast(1.0 + batch_idx)
        loss = self.loss(batch) * scale
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.strategy.barrier()

    def on_train_epoch_end(self) -> None:
        self.see("sent", self.trainer.strategy.broadcast(3.0))
        self.see("mean", self.all_gather(torch.tensor(2.0)).mean())


class Raw(Collects):
    """`all_reduce` of the loss, divided by the number of processes."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if dist.is_initialized():
            total = loss.detach().clone()
            dist.all_reduce(total)
            self.log("total", total / dist.get_world_size())
        return loss


class RawBarrier(Collects):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if dist.is_initialized():
            dist.barrier()
        return super().training_step(batch, batch_idx)


class RawAtEnd(Collects):
    def on_train_epoch_end(self) -> None:
        mean = torch.stack(self.outputs).mean().detach()
        if dist.is_initialized():
            dist.all_reduce(mean)


class RawBarrierAtEnd(Collects):
    def on_train_epoch_end(self) -> None:
        if dist.is_initialized():
            dist.barrier()
        super().on_train_epoch_end()


class Alone(Collects):
    """Only rank 0 of the world calls it."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.is_global_zero:
            self.log("mean", self.all_gather(loss).mean())
        return loss


class AloneAtEnd(Collects):
    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.trainer.strategy.barrier()


RAW = Refused("all ranks in training_step.*self.all_gather", "torch.distributed... over all ranks in training_step")
ALONE = Refused("has not called|different collectives", "has not called ..., or: call different collectives")
RAW_AT_END = Refused("all_reduce over all ranks in on_train_epoch_end")

HABITS = [
    Habit("`self.all_gather` of the loss, in the step and in `on_train_epoch_end`", Gathers, VECTORS,
          everywhere(EXACT), True),
    Habit("`self.all_gather` of scores in the step, collected for the epoch", GathersSamples, VECTORS,
          everywhere(EXACT)),
    Habit("a contrastive loss with `self.all_gather(..., sync_grads=True)`", Contrasts, VECTORS,
          in_cubes(Refused("it runs no backward"))),
    Habit("`self.trainer.strategy.reduce` in both", Reduces, VECTORS, everywhere(EXACT), True),
    Habit("`barrier`, `broadcast` and `self.log(..., sync_dist=True)`", Synchronizes, VECTORS, everywhere(EXACT), True),
    Habit("`torch.distributed.all_reduce` in the step", Raw, VECTORS, everywhere(RAW)),
    Habit("`torch.distributed.barrier` in the step", RawBarrier, VECTORS, everywhere(RAW)),
    Habit("`torch.distributed.all_reduce` in `on_train_epoch_end`", RawAtEnd, VECTORS, everywhere(RAW_AT_END)),
    Habit("`torch.distributed.barrier` in `on_train_epoch_end`", RawBarrierAtEnd, VECTORS, everywhere(EXACT)),
    Habit("`self.all_gather` on rank 0 only, in the step", Alone, VECTORS,
          on(pipelines=EXACT, cubes=ALONE)),
    Habit("a barrier on rank 0 only, in `on_train_epoch_end`", AloneAtEnd, VECTORS,
          everywhere(ALONE)),
]  # fmt: skip
