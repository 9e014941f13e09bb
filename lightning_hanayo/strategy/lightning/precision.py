"""Loss scaling of Lightning's precision plugins: one scale, and one decision to skip a step, on all ranks.

rank 0    gradients are finite     found_inf 0   --+-- all-reduce --   1, skip    scale / 2
rank 1    one gradient is inf      found_inf 1   --+                   1, skip    scale / 2
"""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


def loss_scale(trainer: "pl.Trainer") -> Tensor | None:
    """What the plugin multiplies losses by before their backward, on the device, in fp32; None: it doesn't."""
    scaler = _scaler_of(trainer.precision_plugin)
    return None if scaler is None else scaler.scale(torch.ones((), device=trainer.strategy.root_device))


def agree_on_infinities(plugin: Precision, attributes: TemporaryAttributes) -> None:
    """Let the ranks skip a step together, until `attributes` are restored, if any of them finds inf or NaN."""
    scaler = _scaler_of(plugin)
    if scaler is not None:
        attributes.set(scaler, "_unscale_grads_", partial(_unscale_and_agree, scaler))


def _scaler_of(plugin: Precision) -> GradScaler | None:
    """The plugin's gradient scaler, if it has one that is enabled."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None


def _unscale_and_agree(
    scaler: GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *args: Any
) -> dict[torch.device, Tensor]:
    """Takes the place of the scaler's own method, for fused optimizers too. Called by all ranks, without gradients too.

    The method returns what it has found for each device on which gradients are.
    """
    for found in type(scaler)._unscale_grads_(scaler, optimizer, inv_scale, found_inf, *args).values():
        found_inf += found.to(found_inf.device)
    dist.all_reduce(found_inf, dist.ReduceOp.MAX)
    return {found_inf.device: found_inf}
