"""Optimizers as Lightning wraps and moves them, where some parameters are placeholders."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor
from torch.optim import Optimizer

from lightning_hanayo.partial_values import PartialValues
from lightning_hanayo.partition.missing_values import MissingValues


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, without Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def searches_rate(trainer: "pl.Trainer") -> bool:
    """Whether `Tuner.lr_find` or `LearningRateFinder` trains now, at rates up to those at which losses are NaN."""
    return any(isinstance(callback, _LRCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def move_optimizers(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move the optimizers' states, except those that some (Adagrad) make for placeholders when constructed."""
    for optimizer in optimizers:
        placeholders = {p: optimizer.state.pop(p) for p in list(optimizer.state) if p.is_meta}
        _optimizer_to_device(optimizer, device)
        optimizer.state.update(placeholders)


def unguard_states(optimizers: Sequence[Optimizer]) -> None:
    """Make the states plain tensors that some (Adagrad) have made of guarded parameters when constructed."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            state.update({name: _plain(value) for name, value in state.items()})


def _plain(value: Any) -> Any:
    if not isinstance(value, PartialValues | MissingValues):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)
