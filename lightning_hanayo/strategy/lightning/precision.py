"""The precision: any plugin of Lightning's, with the clipping of a pipeline."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.optim import Optimizer

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes

Clip = Callable[[list[Any], float], object]


def check_precision(plugin: Precision) -> None:
    """Refuse what ranks can't decide alone.

    Raises:
        UnsupportedError: fp16 with a gradient scaler, whose check for infinities sees one rank's gradients only.
    """
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise UnsupportedError(
            "precision='16-mixed' scales the loss by what one rank finds in its own gradients, so the ranks of a "
            "pipeline would part. Use precision='bf16-mixed', which needs no scaling."
        )


def adapt(plugin: Precision, clip: Clip, changes: TemporaryAttributes) -> None:
    """Have `plugin` clip by norm with `clip` until `changes` are undone. It keeps its class, which checkpoints name."""
    changes.set(plugin, "clip_grad_by_norm", partial(_clip_grad_by_norm, plugin, clip))


def _clip_grad_by_norm(plugin: Precision, clip: Clip, optimizer: Optimizer, clip_val: float) -> None:
    clip(list(plugin.main_params(optimizer)), clip_val)
