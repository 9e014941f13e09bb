"""Tells what saves have made from other files, and finds what saves that were killed have left.

checkpoints/last.ckpt/manifest.json                       names the files that count
checkpoints/last.ckpt/model-00000-5f2c9a1b.safetensors    named, or of a save that didn't come to its end
checkpoints/last.ckpt.tmp-5f2c9a1b/                       a new checkpoint, until it is complete
checkpoints/last.ckpt.old-5f2c9a1b                        what was there, until it is replaced
"""

import os
import re
from collections.abc import Collection
from typing import Literal

from lightning_hanayo.checkpoint.format.manifest import FORMAT, MANIFEST, files_named_in
from lightning_hanayo.checkpoint.format.storage import Storage
from lightning_hanayo.errors import CheckpointError

_FILE = re.compile(r"(model|optimizer|state|manifest|marker)(-[a-z0-9-]+)?-[0-9a-f]{8}\.(safetensors|json)")
_BESIDE = re.compile(r"\.(tmp|old)-[0-9a-f]{8}")


def is_of_a_save(name: str) -> bool:
    """Whether a file in a checkpoint's folder has the name of one that saves write."""
    return name == MANIFEST or _FILE.fullmatch(name) is not None


def is_checkpoint(storage: Storage, names: Collection[str]) -> bool:
    """Whether a folder with files of these names is a checkpoint, which may be damaged."""
    if MANIFEST not in names:
        return False
    return FORMAT.encode() in bytes(storage.read(MANIFEST)[:100]) or any(map(_FILE.fullmatch, names))


def file_names(storage: Storage) -> set[str]:
    """Returns the names in a folder, and those that its manifest names: a remote list may not show all files yet."""
    return {*storage.names(), *storage.sizes([MANIFEST]), *(_named_files(storage) or ())}


def unnamed_files(storage: Storage) -> list[str]:
    """Returns the files of saves that the folder's manifest doesn't name.

    There are none if the manifest can't be read, because they may be its own.
    """
    written = [name for name in storage.names() if _FILE.fullmatch(name)] if storage.is_folder() else []
    named = _named_files(storage) if written else ()
    return [] if named is None else [name for name in written if name not in named]


def _named_files(storage: Storage) -> Collection[str] | None:
    """The files that the manifest names: none without a manifest; None if it can't be read."""
    if not storage.sizes([MANIFEST]):
        return ()
    try:
        return files_named_in(bytes(storage.read(MANIFEST)), storage.path)
    except CheckpointError:
        return None


def temporary_path(path: str, kind: Literal["tmp", "old"], save_id: str) -> str:
    """Returns the path next to a checkpoint under which a save writes what is new, or keeps what was there before."""
    parent, slash, name = path.rpartition("/")
    return f"{parent}{slash}{_without_number(name)}.{kind}-{save_id}"


def _without_number(name: str) -> str:
    """The name without what Lightning (2.6) looks for: the digits after `ckpt_` are a SLURM checkpoint's number for it.

    It would take `hpc_ckpt_3.ckpt.tmp-5f2c9a1b` for the latest, number 35291.
    """
    return name.replace("ckpt_", "ckpt-")


def next_to(path: str, *kinds: Literal["tmp", "old"]) -> list[str]:
    """Returns the paths of what saves have made next to a local checkpoint. Its folder must exist."""
    parent, name = os.path.split(os.path.abspath(path))
    name = _without_number(name)
    matches = {one: _BESIDE.fullmatch(one[len(name) :]) for one in os.listdir(parent) if one.startswith(name)}
    return [os.path.join(parent, one) for one, match in sorted(matches.items()) if match and match[1] in kinds]
