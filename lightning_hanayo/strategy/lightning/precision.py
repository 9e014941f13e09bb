"""Precision plugins: rejects what a pipeline can't do, and lets the others clip by the norm of the whole model."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.optim import Optimizer

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes

Clip = Callable[[list[Any], float], object]
"""Clips the gradients of these parameters by the norm of the whole model's."""


def check_precision(plugin: Precision) -> None:
    """Reject precision plugins whose decisions would differ between ranks.

    Raises:
        UnsupportedError: fp16 with a gradient scaler, whose check for infinities sees one rank's gradients only.
    """
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise UnsupportedError(
            "precision='16-mixed' scales the loss by what one rank finds in its own gradients, so the ranks of a "
            "pipeline would diverge. Use precision='bf16-mixed', which needs no scaling."
        )


def clip_with(plugin: Precision, clip: Clip, attributes: TemporaryAttributes) -> None:
    """Let `plugin` clip by norm with `clip` until `attributes` are restored. Its class stays: checkpoints name it."""
    attributes.set(plugin, "clip_grad_by_norm", partial(_clip_grad_by_norm, plugin, clip))


def _clip_grad_by_norm(plugin: Precision, clip: Clip, optimizer: Optimizer, clip_val: float) -> None:
    clip(list(plugin.main_params(optimizer)), clip_val)
