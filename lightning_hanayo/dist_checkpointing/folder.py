"""Opens a checkpoint folder: checks which files are there, reads tensors or regions of them, and documents.

Opening, verifying and reading documents needs no torch.

Verifies a checkpoint on all ranks together: each hashes its share, and all hear what one has found.

Finds checkpoints, tells what they are, and verifies plain files, without torch.

checkpoints/last.ckpt                    a folder with manifest.json
checkpoints/best.ckpt                    one plain file of Lightning: a zip with archive/data.pkl, which isn't unpickled
checkpoints/last.ckpt.tmp-5f2c9a1b/      a leftover of a save that was interrupted
"""

import json
import os
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xxhash import xxh3_128

from lightning_hanayo.dist_checkpointing.format import (
    ITEM_BYTES,
    MANIFEST,
    MAX_BYTES,
    HeaderEntry,
    ImpossibleError,
    Manifest,
    StoredPart,
    WholeTensor,
    damaged,
    header_length,
    read_header,
    stored_as,
)
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.target import CHUNK, Storage, is_of_a_save, unnamed_files
from lightning_hanayo.errors import CheckpointError, HanayoError

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor


_OF_TORCH = ".metadata"
"""in folders of `torch.distributed.checkpoint`"""
_HEADER_BYTES = 2**16
"""Most headers are shorter, and take one request."""


class PartOf(NamedTuple):
    """A part that a file holds, and the tensor that it belongs to."""

    name: str
    tensor: WholeTensor
    part: StoredPart


class CheckpointFolder:
    """A checkpoint whose manifest was checked, and whose files are there and have their sizes.

    Example:
        >>> folder = CheckpointFolder("checkpoints/last.ckpt")
        >>> folder.verify()
        >>> folder.read("model/net.0.weight", Region.of_entries([range(10), range(4)])).shape
        torch.Size([10, 4])

    Raises:
        CheckpointError: it isn't a checkpoint, isn't whole, or is damaged. The message names the file, and is the same
            on all ranks that see the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._storage = Storage(path)
        self._headers: dict[str, dict[str, HeaderEntry]] = {}
        with self._readable(MANIFEST):
            num_bytes = self._storage.sizes([MANIFEST]).get(MANIFEST)
            if num_bytes is None:
                raise CheckpointError(self._why_no_checkpoint())
            if num_bytes > MAX_BYTES:
                raise damaged(self.where(MANIFEST), f"it has {num_bytes} bytes")
            self.manifest = Manifest.from_bytes(bytes(self._storage.read(MANIFEST)), self.where(MANIFEST))
            sizes = self._storage.sizes(self.manifest.files)
        for file, stored in self.manifest.files.items():
            if file not in sizes:
                raise CheckpointError(
                    f"{self.where(file)} is missing. Copy the whole folder {self.path} again, or use an earlier "
                    f"checkpoint."
                )
            if sizes[file] != stored.num_bytes:
                kind = "truncated" if sizes[file] < stored.num_bytes else "too long"
                raise damaged(self.where(file), f"it is {kind}, {sizes[file]} instead of {stored.num_bytes} bytes")

    def where(self, file: str) -> str:
        """Returns the path of one of its files, for messages."""
        return f"{self.path.rstrip('/')}/{file}"

    @property
    def signature(self) -> str:
        """The same on all ranks that see the same save."""
        return self.manifest.save_id

    @cached_property
    def parts(self) -> Mapping[str, Mapping[str, PartOf]]:
        """What each file with tensors holds, by file and key."""
        parts: dict[str, dict[str, PartOf]] = defaultdict(dict)
        for name, tensor in self.manifest.tensors.items():
            for part in tensor.parts:
                parts[part.file][part.key] = PartOf(name, tensor, part)
        return parts

    def read(self, name: str, region: Region | None = None) -> "Tensor":
        """Returns a tensor of the checkpoint, or a region of it, in memory of its own. Little more is read than that.

        Args:
            name: as in the manifest, such as "optimizer/0/net.0.weight/exp_avg".
            region: None: the whole tensor.

        Raises:
            KeyError: there is no such tensor.
            CheckpointError: a file can't be read, or its header isn't what was written. Other bytes are not checked.
        """
        from lightning_hanayo.dist_checkpointing.tensor_file import read_region

        tensor = self.manifest.tensors[name]
        return read_region(tensor, Region.whole(tensor.shape) if region is None else region, self._part_bytes)

    def stored(self, name: str) -> "StoredTensor":
        """Returns a tensor of the checkpoint that is read when it is used. Raises as `read` does."""
        from lightning_hanayo.dist_checkpointing.tensor_file import DTYPES, StoredTensor

        tensor = self.manifest.tensors[name]
        return StoredTensor.of(tensor.shape, DTYPES[tensor.dtype], lambda region: self.read(name, region))

    def text(self, stem: str) -> Any:
        """Returns a JSON document of the checkpoint, whose hash is checked first.

        Raises:
            KeyError: there is no such document.
            CheckpointError: its file is damaged, or can't be read.
        """
        file = self.manifest.texts[stem]
        with self._readable(file):
            data = bytes(self._storage.read(file))
        self._check(file, data)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise damaged(self.where(file), f"it is no JSON ({error})") from None

    def verify(self, rank: int = 0, num_ranks: int = 1, *, kind: str = "") -> None:
        """Read every byte of its files, and compare the hashes. Of several ranks, each reads a share.

        Args:
            rank: of this process.
            num_ranks: how many verify the folder together.
            kind: the beginning of tensors' names, such as "model/": only these are read.

        Raises:
            CheckpointError: a byte isn't what was written, or can't be read. The message names the file, and the tensor
                if it is one's.
        """
        for file, keys in share(self, rank, num_ranks).items():
            wanted = {key for key in keys if self.parts[file][key].name.startswith(kind)}
            if kind and not wanted:
                continue
            if file.endswith(".json"):
                self.text(next(stem for stem, one in self.manifest.texts.items() if one == file))
                continue
            self._headers.pop(file, None)  # so that it is read again
            header = self.header(file)
            for key in sorted(wanted, key=lambda key: header[key].start):
                hashed, one = xxh3_128(), self.parts[file][key]
                with self._readable(file):
                    for chunk in self._storage.chunks(file, header[key].start, header[key].stop):
                        hashed.update(chunk)
                if hashed.hexdigest() != one.part.xxh3_128:
                    raise damaged(self.where(file), f"the values of {one.name} aren't those that were saved")

    def header(self, file: str) -> Mapping[str, HeaderEntry]:
        """Returns where a file has its tensors, by key, in order. Its hash is checked before it is looked at."""
        if file not in self._headers:
            with self._readable(file):
                self._headers[file] = self._read_header(file)
        return self._headers[file]

    def _part_bytes(self, part: StoredPart, start: int, stop: int) -> memoryview:
        """A range of a part's bytes, counted from its first one."""
        entry = self.header(part.file)[part.key]
        with self._readable(part.file):
            return self._storage.read(part.file, entry.start + start, entry.start + stop)

    def _read_header(self, file: str) -> dict[str, HeaderEntry]:
        num_bytes = self.manifest.files[file].num_bytes
        try:
            data = header_bytes(self._storage, file, num_bytes)
            self._check(file, data)
            entries = read_header(data, num_bytes)
        except ImpossibleError as error:
            raise damaged(self.where(file), f"its header isn't that of a safetensors file: {error}") from None
        expected = {key: stored_as(of.tensor.dtype, of.part.region.shape) for key, of in self.parts[file].items()}
        if expected != {key: (entry.dtype, entry.shape) for key, entry in entries.items()}:
            raise damaged(self.where(file), f"it has other tensors than {MANIFEST} says")
        return entries

    def _check(self, file: str, data: bytes) -> None:
        """Compare the hash of a text, or of a header."""
        if xxh3_128(data).hexdigest() != self.manifest.files[file].xxh3_128:
            what = "its text" if file.endswith(".json") else "its header"
            raise damaged(self.where(file), f"{what} isn't the one that save {self.manifest.save_id} wrote")

    def _why_no_checkpoint(self) -> str:
        if self._storage.sizes([_OF_TORCH]):
            return (
                f"{self.path} is a folder of torch.distributed.checkpoint, as FSDPStrategy saves shards. Make one "
                f"file of it, python -m lightning.pytorch.utilities.consolidate_checkpoint {self.path}, and load that."
            )
        if self._storage.is_folder():
            what = "it is no checkpoint of HanayoStrategy, or the save was interrupted"
            return f"{self.path} has no {MANIFEST}: {what}. To list those in it: hanayo ckpt ls {self.path}"
        if self._storage.is_file():
            return f"{self.path} is a file, and not the folder of a checkpoint."
        return f"There is no checkpoint {self.path}. Give a path that all ranks see."

    @contextmanager
    def _readable(self, file: str) -> Iterator[None]:
        """Inside it, a file that can't be read is a CheckpointError."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.where(file)} can't be read: {error.strerror or error}") from None


def header_bytes(storage: Storage, file: str, num_bytes: int) -> bytes:
    """Returns the beginning of a safetensors file of `num_bytes`, up to where its data begins.

    Raises:
        ImpossibleError: it is no safetensors file.
        OSError: it can't be read.
    """
    data = bytes(storage.read(file, 0, min(_HEADER_BYTES, num_bytes)))
    length = header_length(data, num_bytes)
    return data[:length] if length <= len(data) else bytes(storage.read(file, 0, length))


def share(folder: CheckpointFolder, rank: int, num_ranks: int) -> dict[str, set[str]]:
    """Returns what one rank verifies: files, and the keys of tensors in each of them.

    All of them stand in a row, file after file, and a rank takes what begins in its part of the row. Whoever takes
    tensors of a file verifies its header, too.
    """
    row: list[tuple[str, set[str], int]] = []
    for file, stored in folder.manifest.files.items():
        parts = folder.parts.get(file, {})
        sizes = {key: of.part.region.num_entries * ITEM_BYTES[of.tensor.dtype] for key, of in parts.items()}
        row.append((file, set(), max(1, stored.num_bytes - sum(sizes.values()))))  # its header, or all of a text
        row += [(file, {key}, num_bytes) for key, num_bytes in sizes.items()]
    taken: dict[str, set[str]] = defaultdict(set)
    for number in share_of([num_bytes for *_, num_bytes in row], rank, num_ranks):
        file, keys, _ = row[number]
        taken[file] |= keys
    return taken


def share_of(sizes: Sequence[int], rank: int, num_ranks: int) -> Iterator[int]:
    """Yield the numbers of the items that begin in a rank's part of a row of all."""
    total, position = sum(sizes) or 1, 0
    for number, size in enumerate(sizes):
        if position * num_ranks // total == rank:
            yield number
        position += size


Kind = Literal["folder", "file", "incomplete", "leftover"]
_LEFTOVER = re.compile(r".+\.(tmp|old)-[0-9a-f]{8}")
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
    storage = Storage(path)
    if not storage.is_folder() and not storage.is_file():
        raise HanayoError(f"{path}: there is no such file or folder")
    return path


def look_at(path: str) -> Found | None:
    """Returns what is at a path; None if that isn't a checkpoint. Only names, sizes and the manifest are read."""
    storage = Storage(path)
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


def _below(path: str) -> Iterator[Found]:
    storage = Storage(path)
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
            is_of_torch = any(name.endswith("/data.pkl") for name in archive.namelist())
    except _ZIP_ERRORS as error:
        problem = f"it is truncated, damaged, or older than torch 1.6: {error}"
        return Found(path, "incomplete", num_bytes, problem=problem) if path.endswith(".ckpt") else None
    return Found(path, "file", num_bytes, saved=os.path.getmtime(local)) if is_of_torch else None


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
        problem = f"is truncated or damaged, {os.path.getsize(path)} bytes: {error}"
        if isinstance(error, zipfile.BadZipFile) and record is not None:
            problem = f"is damaged: its record {record.filename} has other bytes than were written (CRC-32)"
        raise CheckpointError(f"{path} {problem}. Load another checkpoint.") from None
