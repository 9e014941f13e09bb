"""Rejects the precision plugins that a pipeline can't use."""

from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_hanayo.errors import UnsupportedError


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
