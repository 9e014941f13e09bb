"""The refusals: what a pipeline can't play, said by name before the first message."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch.optim import LBFGS, Optimizer

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.lightning_internals import takes_dataloader_iter
from lightning_hanayo.topology import Topology


def check_module(module: "pl.LightningModule", strategy: Any) -> None:
    """Refuse modules that drive their training themselves.

    Raises:
        UnsupportedError: manual optimization, `dataloader_iter`, or BatchNorm synchronised over the world.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{name} uses manual optimization (automatic_optimization=False), but a pipeline runs the backward of all "
            f"its stages itself, within the training step. Let Lightning drive the optimizer."
        )
    if takes_dataloader_iter(module):
        raise UnsupportedError(
            f"{name}.training_step takes dataloader_iter, but a pipeline cuts each batch into micro-batches. "
            f"Take `batch` instead."
        )
    if strategy._layer_sync is not None:
        raise UnsupportedError(
            "Trainer(sync_batchnorm=True) synchronises BatchNorm over all processes, which hold different stages. "
            "Leave it out; statistics are per micro-batch."
        )


def check_optimizers(optimizers: Sequence[Optimizer], topology: Topology) -> None:
    """Refuse optimizers that look across parameters, of which a pipeline rank has only its own.

    Raises:
        UnsupportedError: more than one optimizer, or one that isn't elementwise.
    """
    if len(optimizers) > 1:
        raise UnsupportedError("several optimizers need manual optimization, which a pipeline can't play")
    for optimizer in optimizers:
        if topology.pipe > 1 and isinstance(optimizer, LBFGS):
            raise UnsupportedError(
                "LBFGS takes all parameters as one vector, but a pipeline rank holds only its own. Use an optimizer "
                "that works on each parameter alone, as AdamW."
            )
