"""Reads one plain checkpoint file, as a Trainer writes it: all bytes are checked, and only the pages used are read.

rank 0    data.pkl  data/0  data/1            each rank checks the CRCs of its share of the records ...
rank 1                              data/2    ... then all map the file, and read the tensors that they need
"""

import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_hanayo.errors import CheckpointError

_CHUNK = 2**20
_ZIP_ERRORS = (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, zlib.error)
"""of a damaged file: a name that is no text, a position before the beginning, a password, another compression"""
_LOCAL_HEADER = struct.Struct("<26xHH")
"""of a record in a zip file: the lengths of the name and of what else lies between the header and the data"""


def is_zip(path: str | Path) -> bool:
    """Whether it is a file in torch's format, whole or damaged; before torch 1.6 it was another."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def verify(path: str | Path, rank: int = 0, num_ranks: int = 1) -> None:
    """Check this rank's share of a file in torch's format, by the CRCs that the file has of its records.

    Raises:
        CheckpointError: a record is damaged, or the file is truncated.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for record in _share(archive.infolist(), rank, num_ranks):
                _check(path, archive, record)
    except CheckpointError:
        raise
    except _ZIP_ERRORS as error:
        raise CheckpointError(
            f"{path} is truncated or damaged, {Path(path).stat().st_size} bytes: {error}. Load another checkpoint."
        ) from None


def load_mapped(path: str | Path, *, weights_only: bool | None) -> Any:
    """Return what the file holds; its tensors are views of the mapped file, which change no byte of it.

    Raises:
        CheckpointError: it holds objects that only code could rebuild, or can't be read.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise refusal(path, error) from None


def refusal(path: str | Path, error: Exception) -> CheckpointError:
    """What to say of a file that torch could not read."""
    classes = _unsafe_classes(path)
    if not classes:
        reason = str(error).strip().partition("\n")[0]
        return CheckpointError(f"{path} can't be read as a checkpoint: {reason}. Load another one.")
    several = len(classes) > 1
    return CheckpointError(
        f"{path} holds objects of {', '.join(classes)}, which only code can rebuild: reading a file never runs code. "
        f"If you trust the file, allow {'the classes' if several else 'the class'} before the Trainer runs, "
        f"torch.serialization.add_safe_globals([{', '.join(one.rpartition('.')[2] for one in classes)}]), or give the "
        f"Trainer weights_only=False."
    )


def _unsafe_classes(path: str | Path) -> list[str]:
    """The classes in a file that torch doesn't allow. They are read as names alone."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a file that isn't in torch's format, or is damaged
        return []


def _share(records: list[zipfile.ZipInfo], rank: int, num_ranks: int) -> Iterator[zipfile.ZipInfo]:
    """The records in whose middle bytes the rank's share of all bytes lies."""
    total, start = sum(record.file_size for record in records), 0
    for record in records:
        middle = start + record.file_size // 2
        start += record.file_size
        if middle * num_ranks // max(total, 1) == rank or (total == 0 and rank == 0):
            yield record


def _check(path: str | Path, archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    try:
        with archive.open(record) as data:
            while data.read(_CHUNK):
                pass
    except zipfile.BadZipFile:
        raise CheckpointError(
            f"{path} is damaged: {_meaning(path, record)} has other bytes than were written (CRC-32). Load another "
            f"checkpoint."
        ) from None


def _meaning(path: str | Path, record: zipfile.ZipInfo) -> str:
    """The name of the tensor that a record holds, else that of the record."""
    name = record.filename.partition("/")[2]
    if not name.startswith("data/"):
        return f"its record {name}"
    try:
        offset = _data_offset(path, record)
        with FakeTensorMode():
            content = torch.load(path, weights_only=True)
        leaves, _ = tree_flatten_with_path(content)
    except Exception:  # the message names the record, if the rest is damaged, too
        return f"its record {name}"
    found = (keystr(keys) for keys, leaf in leaves if isinstance(leaf, Tensor) and _offset_of(leaf) == offset)
    return next(found, f"its record {name}")


def _data_offset(path: str | Path, record: zipfile.ZipInfo) -> int:
    with open(path, "rb") as file:
        file.seek(record.header_offset)
        name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return int(record.header_offset + _LOCAL_HEADER.size + name_length + extra_length)


def _offset_of(tensor: Tensor) -> int | None:
    """Where the tensor's memory begins in the file; torch notes it when it loads tensors without data."""
    offset: int | None = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return offset
