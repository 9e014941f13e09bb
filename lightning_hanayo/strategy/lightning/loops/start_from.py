"""Lets a run start from another checkpoint than the one that `fit` was given."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes

Load = Callable[[Any, bool | None], None]
"""loads a checkpoint from a path, with `weights_only` as for `torch.load`; None: there is nothing to load"""


def load_instead(
    trainer: "pl.Trainer", attributes: TemporaryAttributes, load: Callable[[Load, Any, bool | None], None]
) -> None:
    """Call `load` where Lightning would load the checkpoint that the user gave.

    Args:
        trainer: of a run that has not loaded anything so far.
        attributes: restored at the end of the run.
        load: gets Lightning's own function, which it may call with other arguments, and the user's path.
    """
    connector = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        load(original, checkpoint_path, weights_only)

    attributes.set(connector, "resume_start", resume_start)


def loaded(trainer: "pl.Trainer") -> Mapping[str, Any]:
    """The checkpoint that was loaded."""
    return trainer._checkpoint_connector._loaded_checkpoint


def was_in_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Whether it was saved in the middle of an epoch."""
    batches = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return bool(batches.get("current", {}).get("processed")) and not batches.get("is_last_batch")
