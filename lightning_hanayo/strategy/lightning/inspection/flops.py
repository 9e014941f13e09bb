"""Counts FLOPs of the whole model on the meta device, and what the device could do."""

import warnings

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary

from lightning_hanayo.strategy.lightning.inspection.model_summary import whole_on_meta


def forward_flops(module: "pl.LightningModule") -> int:
    """The FLOPs of a forward of `example_input_array`; 0 if it depends on more than shapes.

    Only what torch counts: products of matrices, convolutions, attention. Nothing is computed.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ModelSummary(whole_on_meta(module), max_depth=0).total_flops
    except Exception:  # the user's forward, with tensors that have no values
        return 0


def peak_flops(trainer: "pl.Trainer") -> int | None:
    """FLOP/s of this rank's device at the run's precision; None if Lightning doesn't know the chip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_available_flops(trainer.strategy.root_device, _plugin_to_compute_dtype(trainer.precision_plugin))
