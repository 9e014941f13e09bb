"""Optimizers as Lightning wraps and moves them, where some parameters are placeholders."""

from collections.abc import Sequence

import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, without Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def move_optimizers(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move the optimizers' states, except those that some (Adagrad) make for placeholders when constructed."""
    for optimizer in optimizers:
        placeholders = {p: optimizer.state.pop(p) for p in list(optimizer.state) if p.is_meta}
        _optimizer_to_device(optimizer, device)
        optimizer.state.update(placeholders)
