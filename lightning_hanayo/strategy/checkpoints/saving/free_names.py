"""Lets `ModelCheckpoint` find out which names are taken while a checkpoint is written in the background.

same.ckpt       being written: it gets its name when it is whole
same.ckpt?      Lightning asks: waits for it, then it is taken, so same-v1.ckpt. The save that follows would wait, too
"""

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hanayo.strategy.checkpoints.saving.save import Checkpoints
from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes

_SLURM_PREFIX = "hpc_ckpt_"


def adapt_callbacks(trainer: "pl.Trainer", checkpoints: Checkpoints, attributes: TemporaryAttributes) -> None:
    """Let callbacks look for a name once the save in flight has ended. Their questions are asked by all ranks."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelCheckpoint) and checkpoints.in_background:
            attributes.set(callback, "file_exists", _AfterSave(callback.file_exists, checkpoints.wait))


def ends_job(path: str | os.PathLike[str]) -> bool:
    """Whether it is the checkpoint after which Lightning lets SLURM end this job at once, and start it again."""
    return os.path.basename(os.fspath(path)).startswith(_SLURM_PREFIX)


class _AfterSave:
    """Takes the place of a callback's `file_exists`. Copies of the callback have its own again."""

    def __init__(self, ask: Callable[..., bool], wait: Callable[[], object]) -> None:
        self._ask, self._wait = ask, wait

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        self._wait()
        return self._ask(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self._ask,)


def _itself(ask: Any) -> Any:
    return ask
