"""The precision: any plugin of Lightning's, with the clipping of a pipeline."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.optim import Optimizer

from lightning_hanayo.errors import UnsupportedError

Clip = Callable[[list[Any], float], object]


def adapt(plugin: Precision, clip: Clip) -> Precision:
    """`plugin` itself, its class swapped for a subclass of the same name (checkpoints store it) that calls `clip`.

    Raises:
        UnsupportedError: fp16 with a gradient scaler, whose check for infinities sees one rank's gradients only.
    """
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise UnsupportedError(
            "precision='16-mixed' scales the loss by what one rank finds in its own gradients, so the ranks of a "
            "pipeline would part. Use precision='bf16-mixed', which needs no scaling."
        )
    if hasattr(type(plugin), "_hanayo"):
        plugin._clip = clip  # type: ignore[attr-defined]
        return plugin
    base = type(plugin)

    def clip_grad_by_norm(self: Any, optimizer: Optimizer, clip_val: float) -> None:
        self._clip(list(self.main_params(optimizer)), clip_val)

    members = {"clip_grad_by_norm": clip_grad_by_norm, "_hanayo": True, "__qualname__": base.__qualname__}
    plugin.__class__ = type(base.__name__, (base,), {**members, "__module__": base.__module__})
    plugin._clip = clip  # type: ignore[attr-defined]
    return plugin
