"""Loss scaling of Lightning's precision plugins: one scale, and one decision to skip a step, on all ranks.

rank 0    gradients are finite     found_inf 0   --+-- all-reduce --   1, skip    scale / 2
rank 1    one gradient is inf      found_inf 1   --+                   1, skip    scale / 2
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_hanayo.errors import available
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes

OnGradients = Callable[[Optimizer, Callable[[], object]], object]
OnUnscaled = Callable[[Optimizer, Tensor, Tensor], object]


def loss_scale(trainer: "pl.Trainer") -> Tensor | None:
    """What the plugin multiplies losses by before their backward, on the device, in fp32; None: it doesn't."""
    scaler = _scaler_of(trainer.precision_plugin)
    return None if scaler is None else scaler.scale(torch.ones((), device=trainer.strategy.root_device))


def call_before_steps(
    plugin: Precision, attributes: TemporaryAttributes, on_gradients: OnGradients, on_unscaled: OnUnscaled
) -> None:
    """Until `attributes` are restored, let the ranks agree on infinite gradients, and call what looks at gradients.

    Args:
        plugin: the Trainer's.
        attributes: take what is changed.
        on_gradients: called after hooks with a function that clips, if the plugin has no scaler.
        on_unscaled: called by the scaler with what any rank has found, and its scale.
    """
    scaler = _scaler_of(plugin)
    if scaler is not None:
        attributes.set(scaler, "_unscale_grads_", partial(_unscale_and_agree, scaler, on_unscaled))
    else:
        attributes.set(plugin, "_clip_gradients", partial(_clip_gradients, plugin, on_gradients))


def _clip_gradients(
    plugin: Precision, on_gradients: OnGradients, model: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
) -> None:
    """Takes the place of the plugin's own method: the last that is called, with complete gradients, before a step."""
    on_gradients(optimizer, partial(type(plugin)._clip_gradients, plugin, model, optimizer, *args, **kwargs))


def _scaler_of(plugin: Precision) -> GradScaler | None:
    """The plugin's gradient scaler, if it has one that is enabled."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None


def _unscale_and_agree(
    scaler: GradScaler,
    on_unscaled: OnUnscaled,
    optimizer: Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    *args: Any,
) -> dict[torch.device, Tensor]:
    """Takes the place of the scaler's own method, for fused optimizers too. Called by all ranks, without gradients too.

    The method returns what it has found for each device on which gradients are.
    """
    for found in type(scaler)._unscale_grads_(scaler, optimizer, inv_scale, found_inf, *args).values():
        found_inf += found.to(found_inf.device)
    if dist.get_world_size() > 1:
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
    scale = available(scaler._get_scale_async(), "the scale exists once a loss was scaled")
    on_unscaled(optimizer, found_inf, scale)
    return {found_inf.device: found_inf}
