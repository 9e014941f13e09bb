"""Refuses a checkpoint to start from that isn't there, or can't be read, before any process starts."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO

from lightning_hanayo.checkpoint.load.folder import CheckpointFolder
from lightning_hanayo.errors import CheckpointError, CheckpointNotFoundError, nearest

_CHOSEN_LATER = ("last", "hpc")
"""Lightning finds them when the run starts, and starts anew if there is no last one."""
_FIRST_BYTES = (b"PK", b"\x80")
"""of a file in torch's format, and of its format before torch 1.6"""


def check_start(path: Any, trainer: "pl.Trainer", io: CheckpointIO) -> None:
    """Check the `ckpt_path` of a run. What is remote, or written by another CheckpointIO, is checked when it is read.

    Raises:
        CheckpointError: it is no path, there is nothing, or nothing that can be read.
    """
    if path is None or path in _CHOSEN_LATER or str(path).startswith("registry"):
        return
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise CheckpointError(f"ckpt_path={path!r}: expected the path of a checkpoint, 'last', 'best' or None")
    if path == "best":
        if not getattr(trainer.checkpoint_callback, "best_model_path", ""):
            raise CheckpointError(
                "ckpt_path='best': no ModelCheckpoint of this Trainer has saved a best one. Give the path of one."
            )
    elif isinstance(get_filesystem(str(path)), LocalFileSystem):
        check_local(url_to_fs(str(path))[1], io)


def check_local(path: str, io: CheckpointIO | None = None) -> None:
    """Check a path in a local file system.

    Raises:
        CheckpointError: there is nothing, or nothing that can be read.
    """
    if not os.path.exists(path):
        raise CheckpointNotFoundError(
            f"Checkpoint file not found: ckpt_path={path}: there is no such file or folder{_others(Path(path))}"
        )
    if io is not None and type(io) is not TorchCheckpointIO:
        return
    if os.path.isdir(path):
        CheckpointFolder(path)
        return
    try:
        with open(path, "rb") as file:
            begin = file.read(2)
    except OSError as error:
        raise CheckpointError(f"ckpt_path={path} can't be read: {error.strerror}") from None
    if not begin.startswith(_FIRST_BYTES):
        what = "is no checkpoint: it is not in torch's format" if begin else "is empty"
        raise CheckpointError(f"ckpt_path={path} {what}. Give another one.")


def _others(path: Path) -> str:
    """What is there instead."""
    try:
        found = sorted(one.name for one in path.parent.iterdir() if one.suffix == path.suffix)
    except OSError:
        return f", nor a folder {path.parent}"
    return f"; {nearest(path.name, found[-5:])}" if found else ""
