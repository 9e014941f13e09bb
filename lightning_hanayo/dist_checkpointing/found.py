"""Finds checkpoints, tells what they are, and verifies plain files, without torch.

checkpoints/last.ckpt                    a folder with manifest.json
checkpoints/best.ckpt                    one plain file of Lightning: a zip with archive/data.pkl, which isn't unpickled
checkpoints/last.ckpt.tmp-5f2c9a1b/      a leftover of a save that was interrupted
"""

import os
import pickletools
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, Literal

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder, share_of
from lightning_hanayo.dist_checkpointing.format import MANIFEST
from lightning_hanayo.dist_checkpointing.storage import CHUNK, Storage, storage_of
from lightning_hanayo.dist_checkpointing.target import is_of_a_save, unnamed_files
from lightning_hanayo.errors import CheckpointError, HanayoError

Kind = Literal["folder", "file", "incomplete", "leftover"]
_LEFTOVER = re.compile(r".+\.(tmp|old)-[0-9a-f]{8}")
_MAX_OPCODES = 1000
"""of a file's pickle, that are looked at: step and epoch are at its beginning"""
_ZIP_ERRORS = (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, zlib.error)
"""of a damaged file: a name that is no text, a position before the beginning, a password, another compression"""


@dataclass(frozen=True)
class Found:
    """A checkpoint, or what is left of one."""

    path: str
    kind: Kind
    num_bytes: int
    step: int | None = None
    epoch: int | None = None
    layout: str = ""
    """such as "pipe=2 data=2 waves=1"; "" for a file, which has none"""
    saved: float = 0.0
    """when it was saved, in seconds since 1970; 0: not known"""
    problem: str = ""
    """why it isn't whole, as far as names and sizes tell; "" if it is"""


def existing(path: str) -> str:
    """Returns the path, where something is.

    Raises:
        HanayoError: there is nothing.
    """
    storage = storage_of(path)
    if not storage.is_folder() and not storage.is_file():
        raise HanayoError(f"{path}: there is no such file or folder")
    return path


def look_at(path: str) -> Found | None:
    """Returns what is at a path; None if that isn't a checkpoint. Only names, sizes and the manifest are read."""
    storage = storage_of(path)
    name = os.path.basename(path.rstrip("/"))
    if storage.is_folder():
        return _folder(path, storage, is_leftover=bool(_LEFTOVER.fullmatch(name)))
    if not storage.is_file() or not storage.is_local:
        return None
    num_bytes = os.path.getsize(storage.path)
    if _LEFTOVER.fullmatch(name):
        return Found(path, "leftover", num_bytes, problem=_INTERRUPTED)
    return _file(path, storage.path, num_bytes)


def look_into(path: str) -> list[Found]:
    """Returns the checkpoints in a folder and in the folders below it; the one at the path, if it is one itself.

    Raises:
        HanayoError: there is no such path.
    """
    itself = look_at(existing(path))
    return [itself] if itself is not None else list(_below(path))


def look_at_one(path: str) -> Found | None:
    """Returns what is at a path, as `look_at` does.

    Raises:
        HanayoError: there is nothing, or a folder of several checkpoints.
    """
    found = look_at(existing(path))
    inner = [] if found is not None else [one for one in _below(path) if not one.problem]
    if inner:
        raise HanayoError(f"{path} is no checkpoint, but holds {inner[0].path}. To list all: hanayo ckpt ls {path}")
    return found


def _below(path: str) -> Iterator[Found]:
    storage = storage_of(path)
    for name in storage.names() if storage.is_folder() else ():
        inner = f"{path.rstrip('/')}/{name}"
        found = look_at(inner)
        if found is not None:
            yield found
        elif not (storage.is_local and os.path.islink(inner)):
            yield from _below(inner)


_INTERRUPTED = "a save that was interrupted has left it; the next save to the same path removes it"


def _folder(path: str, storage: Storage, *, is_leftover: bool) -> Found | None:
    names = storage.names()
    num_bytes = sum(storage.sizes(names).values())
    if is_leftover:
        return Found(path, "leftover", num_bytes, problem=_INTERRUPTED)
    if MANIFEST not in names and not any(map(is_of_a_save, names)):
        return None
    try:
        manifest = CheckpointFolder(path).manifest
    except CheckpointError as error:
        return Found(path, "incomplete", num_bytes, problem=str(error))
    layout = layout_text(manifest.layout)
    unnamed = unnamed_files(storage)
    problem = f"whole; with {len(unnamed)} files of an interrupted save" if unnamed else ""
    saved = 0.0
    with suppress(ValueError):
        saved = datetime.fromisoformat(manifest.created).timestamp()
    return Found(path, "folder", num_bytes, manifest.step, manifest.epoch, layout, saved, problem)


def layout_text(layout: Mapping[str, Any]) -> str:
    """The sizes of a layout that say something.

    Example:
        >>> layout_text({"data": 1, "pipe": 2, "cube": [1, 2, 1], "waves": 1, "schedule": "hanayo"})
        'pipe=2 cube=1x2x1 waves=1 schedule=hanayo'
    """
    texts = {key: "x".join(map(str, value)) if isinstance(value, list) else value for key, value in layout.items()}
    return " ".join(f"{key}={text}" for key, text in texts.items() if text not in (1, "1x1x1") or key == "waves")


def _file(path: str, local: str, num_bytes: int) -> Found | None:
    try:
        with zipfile.ZipFile(local) as archive:
            # as torch writes it, uncompressed: so it is no larger than the file
            records = [one for one in archive.infolist() if one.compress_type == zipfile.ZIP_STORED]
            pickles = [one.filename for one in records if one.filename.endswith("/data.pkl")]
            numbers = _numbers(archive, pickles[0]) if pickles else None
    except _ZIP_ERRORS as error:
        problem = f"it is truncated, damaged, or older than torch 1.6: {error}"
        return Found(path, "incomplete", num_bytes, problem=problem) if path.endswith(".ckpt") else None
    if numbers is None:
        return None
    saved = os.path.getmtime(local)
    return Found(path, "file", num_bytes, numbers.get("global_step"), numbers.get("epoch"), saved=saved)


def _numbers(archive: zipfile.ZipFile, name: str) -> dict[str, int]:
    """The numbers after the first texts of a pickle, of which nothing is run."""
    numbers: dict[str, int] = {}
    key = None
    with archive.open(name) as file:
        for opcode, argument, _ in islice(pickletools.genops(file), _MAX_OPCODES):
            if "UNICODE" in opcode.name:
                key = argument
            elif type(argument) is int and "PUT" not in opcode.name and key is not None:
                numbers.setdefault(key, argument)
                key = None
    return numbers


def verify_file(path: str, rank: int = 0, num_ranks: int = 1) -> None:
    """Check this rank's share of a file in torch's format, by the CRCs that the file has of its records.

    Raises:
        CheckpointError: a record is damaged, or the file is truncated.
    """
    record: zipfile.ZipInfo | None = None
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            for number in share_of([one.file_size for one in records], rank, num_ranks):
                record = records[number]
                with archive.open(record) as data:
                    while data.read(CHUNK):
                        pass
    except _ZIP_ERRORS as error:
        if isinstance(error, zipfile.BadZipFile) and record is not None:
            raise CheckpointError(
                f"{path} is damaged: {_meaning(path, record.filename.partition('/')[2])} has other bytes than were "
                f"written (CRC-32). Load another checkpoint."
            ) from None
        raise CheckpointError(
            f"{path} is truncated or damaged, {os.path.getsize(path)} bytes: {error}. Load another checkpoint."
        ) from None


def _meaning(path: str, record: str) -> str:
    """The name of the tensor that a record holds, else that of the record."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import keystr, tree_flatten_with_path

    try:
        offset = torch._C.PyTorchFileReader(path).get_record_offset(record)  # type: ignore[attr-defined]
        with FakeTensorMode():  # torch notes where a tensor's memory begins in the file when it loads it without data
            leaves, _ = tree_flatten_with_path(torch.load(path, weights_only=True))
        tensors = ((keys, leaf) for keys, leaf in leaves if isinstance(leaf, torch.Tensor))
        return next(keystr(keys) for keys, one in tensors if one.untyped_storage()._checkpoint_offset == offset)
    except Exception:  # the rest may be damaged, too, or the record is no tensor
        return f"its record {record}"
