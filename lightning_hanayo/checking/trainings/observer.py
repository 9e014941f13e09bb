"""Copies what a run leaves, by name: losses, gradients, weights, buffers and logged values of each optimizer step."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_hanayo.checking.comparison import Key, Kind, Values

Losses = Callable[[Any], Mapping[int, Tensor]]
"""The losses of a batch, by data rank, from what its `training_step` has returned; empty where this rank has none."""


class Observer(Callback):
    """The last callback of a run. In a cube, whose ranks hold shards, all of its ranks gather them here.

    Args:
        losses: gives the losses of a batch.
        accumulate: the batches of one optimizer step.
        num_data: D, data ranks.
        logs: whether this rank's logged values count.
    """

    def __init__(self, losses: Losses, accumulate: int, num_data: int, *, logs: bool) -> None:
        self.values: Values = {}
        self._losses = losses
        self._accumulate = accumulate
        self._num_data = num_data
        self._logs = logs

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Before clipping, and before the module's own hook."""
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad and not parameter.is_meta:
                self._keep(trainer.global_step, "gradient", name, _whole_gradient(trainer, parameter))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the optimizer's step, if there was one."""
        step, place = divmod(batch_idx, self._accumulate)
        for data_rank, loss in self._losses(outputs).items():
            of_rank = f", data rank {data_rank}" if self._num_data > 1 else ""
            self._keep(step, "loss", f"batch {batch_idx}{of_rank}", loss)
        if self._logs:
            self._keep_logs(trainer, step, f"batch {batch_idx}")
        if place == self._accumulate - 1:
            if (session := _session(trainer)) is not None:
                session.finish_gather()
            for name, parameter in pl_module.named_parameters():
                if not parameter.is_meta:
                    self._keep(step, "weight", name, _whole(trainer, parameter, parameter))
            for name, buffer in pl_module.named_buffers():
                if not buffer.is_meta:
                    self._keep(step, "buffer", name, buffer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The means over the epoch."""
        if self._logs:
            self._keep_logs(trainer, trainer.global_step - 1, "epoch")

    def _keep_logs(self, trainer: pl.Trainer, step: int, when: str) -> None:
        for name, value in trainer.callback_metrics.items():
            self._keep(step, "log", f"{name} ({when})", value)

    def _keep(self, step: int, kind: Kind, name: str, value: Tensor) -> None:
        self.values[Key(step, kind, name)] = value.detach().cpu().clone()


def _session(trainer: pl.Trainer) -> Any:
    return getattr(trainer.strategy, "session", None)


def _whole_gradient(trainer: pl.Trainer, parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient; gathered from the data ranks, too, if each has the sums of its own rows alone."""
    if parameter.grad is None:
        return _whole(trainer, torch.zeros_like(parameter), parameter)
    shards = None if (session := _session(trainer)) is None else session.shards
    if shards is None or not shards.scatters or parameter not in shards:
        return _whole(trainer, parameter.grad, parameter)
    whole: Tensor = shards.unshard(shards.own_rows(parameter, parameter.grad), parameter)
    return whole


def _whole(trainer: pl.Trainer, value: Tensor, parameter: nn.Parameter) -> Tensor:
    """The value of a parameter, or its gradient, gathered from the ranks of its cube if there is one."""
    session = _session(trainer)
    if session is None or session.cube is None:
        return value
    whole: Tensor = session.cube.unshard(value, parameter)
    return whole
