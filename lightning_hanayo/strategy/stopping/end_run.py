"""Ends a run that a signal has stopped: saves a checkpoint, and says what was saved and how to go on."""

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hanayo.strategy.stopping.stop_together import AGREE_WITHIN, Decision
from lightning_hanayo.strategy.stopping.stopped import Interrupted, StoppedBySignal, name_of

CHECKPOINT_NAME = "stopped.ckpt"
"""next to the files of the first `ModelCheckpoint`; the next one replaces it"""


def save(trainer: "pl.Trainer", finish: Callable[[], object], *, has_trained: bool) -> str:
    """Save a checkpoint, if there is something to save. Called by all ranks alike, between two batches.

    Args:
        trainer: whose run ends.
        finish: waits until the checkpoint is there.
        has_trained: whether a batch has been trained in this run.

    Returns:
        What to tell the user.

    Raises:
        CheckpointError: the checkpoint can't be saved.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return "there is nothing to save"
    if not has_trained:
        return "no batch was trained since the start, so nothing is saved"
    path = _path(trainer)
    if path is None:
        return "nothing is saved, for the Trainer has no ModelCheckpoint"
    trainer.save_checkpoint(path)
    finish()
    return f"saved {path}; resume with ckpt_path={path!r}"


def what_stopped(trainer: "pl.Trainer", decision: Decision, rank: str) -> str:
    """What has stopped the run, and where. `rank`: the one that got the signal, with its place."""
    when = f"after step {trainer.global_step}" if trainer.state.fn == TrainerFn.FITTING else "between two batches"
    return f"stopped by {name_of(decision.signal)} on {rank} {when}"


def report_of(exception: BaseException) -> str | None:
    """What to tell the user once, if a signal has stopped the run; None: something else has ended it."""
    return exception.report if isinstance(exception, StoppedBySignal | Interrupted) else None


def no_agreement(decision: Decision, name: Callable[[int], str]) -> str:
    """Why the run ends at once, without a checkpoint; put after the name of the first rank that is missing."""
    more = "".join(f", nor {name(rank)}" for rank in decision.missing[1:])
    return (
        f"did not answer for {AGREE_WITHIN:g} s{more}: the ranks can't stop at the same step for "
        f"{name_of(decision.signal)} on {name(decision.rank)}. Resume from a checkpoint that was saved before."
    )


def _path(trainer: "pl.Trainer") -> str | None:
    """Where the checkpoint is saved; None: the run saves no checkpoints by itself."""
    callbacks: list[Any] = trainer.checkpoint_callbacks
    folders = (one.dirpath for one in callbacks if isinstance(one, ModelCheckpoint) and one.dirpath)
    folder = next(folders, None)
    return None if folder is None else os.path.join(folder, CHECKPOINT_NAME)
