"""Writes a checkpoint that is one file: under another name, until it is complete."""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from lightning_hanayo.checkpoint.format.storage import Storage
from lightning_hanayo.checkpoint.save.leftovers import is_checkpoint, is_of_a_save, temporary_path
from lightning_hanayo.checkpoint.save.problems import problem_of
from lightning_hanayo.checkpoint.save.removal import remove_next_to
from lightning_hanayo.errors import CheckpointError


def write_file(path: str, write: Callable[[BinaryIO], object]) -> None:
    """Write a file that is the one of before until it is complete. One process calls it.

    A folder of that name, such as the checkpoint of several ranks, is replaced, too.

    Args:
        path: local, or an URL that fsspec knows. Folders above it are made.
        write: writes the content into an open file.

    Example:
        >>> write_file("last.ckpt", lambda file: torch.save(checkpoint, file))

    Raises:
        CheckpointError: it can't be written. What was there before is untouched, and nothing is left of the new file.
    """
    try:
        _write(path, write)
    except OSError as error:
        raise CheckpointError(
            f"{path} was not saved: {problem_of(error, path)}. What was there before is untouched."
        ) from error


class _Watched:
    """A file that keeps the error of its last write: torch's archive writer raises one of its own instead."""

    error: OSError | None = None

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise


def _call(write: Callable[[BinaryIO], object], file: BinaryIO) -> None:
    """Write, and raise what the file raised, if anything."""
    watched = _Watched(file)
    try:
        write(watched)  # type: ignore[arg-type]
    except Exception as error:
        if watched.error is not None:
            raise watched.error from error
        raise


def _write(path: str, write: Callable[[BinaryIO], object]) -> None:
    target = Storage.of(path)
    path = os.path.abspath(target.path) if target.is_local else path.rstrip("/")
    parent, _, name = path.rpartition("/")
    folder = Storage.of(parent + "/")  # with a slash: "/" and "memory://" are folders, too
    folder.make_folder()
    save_id = secrets.token_hex(4)
    is_folder = target.is_local and target.is_folder() and not os.path.islink(path)
    if is_folder and not all(map(is_of_a_save, names := target.names())) and not is_checkpoint(target, names):
        raise CheckpointError(
            f"{path} was not saved: it is a folder with other files than a checkpoint's. Save under another name."
        )
    new, old = temporary_path(name, "tmp", save_id), temporary_path(path, "old", save_id)
    try:
        if folder.is_local:
            remove_next_to(path, "tmp")
        with folder.create(new) as file:
            _call(write, file)
        if is_folder:
            os.rename(path, old)
        folder.replace(new, name)
    except BaseException:
        with suppress(OSError):
            folder.remove(new)
            if os.path.isdir(old):
                os.rename(old, path)
        raise
    if folder.is_local:
        remove_next_to(path, "tmp", "old")
