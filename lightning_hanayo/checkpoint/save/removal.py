"""Removes a checkpoint: first what makes it one, so that what a kill in between leaves never claims to be whole."""

import os
import shutil
from contextlib import suppress
from typing import Literal
from warnings import warn

from lightning_hanayo.checkpoint.format.manifest import MANIFEST
from lightning_hanayo.checkpoint.format.storage import Storage
from lightning_hanayo.checkpoint.save.leftovers import file_names, is_checkpoint, is_of_a_save, next_to


def remove_checkpoint(path: str) -> None:
    """Remove the folder or the file that a save has written, with what killed saves have left. One process calls it.

    Of a link only the link is removed. Files of others in the folder stay, and a warning names them; so does what
    can't be removed. What isn't there is removed already.
    """
    storage = Storage.of(path.rstrip("/"))
    try:
        if storage.is_local and os.path.isdir(os.path.dirname(os.path.abspath(storage.path))):
            remove_next_to(storage.path, "tmp", "old")
        if storage.is_file() or (storage.is_local and os.path.islink(storage.path)):
            storage.remove("")
        elif storage.is_folder():
            _remove_folder(storage)
    except OSError as error:
        warn(f"{path} can't be removed: {error}", stacklevel=2)


def _remove_folder(storage: Storage) -> None:
    names = file_names(storage)
    is_ours = is_checkpoint(storage, names) or MANIFEST not in names
    ours = [name for name in names if is_ours and is_of_a_save(name)]
    for name in sorted(ours, key=MANIFEST.__ne__):
        storage.remove(name)
    foreign = sorted(name for name in names if name not in ours)
    if foreign:
        warn(f"{storage.path} is kept: files that no save has written are in it, such as {foreign[0]}", stacklevel=3)
        return
    if storage.is_local:
        os.rmdir(storage.path)
    else:
        with suppress(FileNotFoundError):  # an object store has no folder without files
            storage.remove_folder()


def remove_next_to(path: str, *kinds: Literal["tmp", "old"]) -> None:
    """Remove what saves have left next to a local checkpoint."""
    for one in next_to(path, *kinds):
        if os.path.islink(one) or not os.path.isdir(one):
            os.remove(one)
        elif ".tmp-" in os.path.basename(one):
            shutil.rmtree(one)
        else:
            _remove_folder(Storage.of(one))
