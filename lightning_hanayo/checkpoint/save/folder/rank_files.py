"""Writes the files of one rank: a safetensors file for each kind of tensors, and its JSON documents."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, get_args

from xxhash import xxh3_128

from lightning_hanayo.checkpoint.format.stored import StoredFile, StoredPart
from lightning_hanayo.checkpoint.format.tensor_file import dtype_name, write_tensors
from lightning_hanayo.checkpoint.save.folder.points import AtPoint, Point
from lightning_hanayo.checkpoint.save.folder.target import Target
from lightning_hanayo.checkpoint.save.part import Kind, TensorPart


@dataclass(frozen=True)
class WrittenPart:
    """A part of a tensor that is in a file now."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """of the whole tensor"""
    stored: StoredPart


@dataclass(frozen=True)
class Written:
    """What one rank has written, for the manifest."""

    files: Mapping[str, StoredFile]
    """by name"""
    parts: Sequence[WrittenPart]
    texts: Mapping[str, str]
    """the file of each document, by its stem"""


class RankFiles:
    """Writes one rank's files, whose names say the rank and the save.

    Args:
        at: is called at HALF_WRITTEN, WRITTEN and SYNCED.
        check: is called again and again while tensors are written; what it raises ends the writing.
    """

    def __init__(self, target: Target, rank: int, at: AtPoint, check: Callable[[], object]) -> None:
        self._files: dict[str, StoredFile] = {}
        self._parts: list[WrittenPart] = []
        self._texts: dict[str, str] = {}
        self._target, self._rank = target, rank
        self._at, self._check = at, check
        self._started: list[str] = []
        self._bytes_to_half: int | None = None

    def write(self, tensors: Sequence[TensorPart], texts: Mapping[str, bytes]) -> Written:
        """Write all, and return when it is on the disk. If it raises, no file is left."""
        self._bytes_to_half = sum(one.num_bytes for one in tensors) // 2
        try:
            with ExitStack() as files:  # which syncs them at its end, when the disk has been at work for a while
                for kind in get_args(Kind):
                    self._write_tensors(files, kind, [one for one in tensors if one.kind == kind])
                self._pass_half()  # a rank with little to write passes the same points
                for stem, content in texts.items():
                    self._write_text(files, stem, content)
                self._at(Point.WRITTEN)
            self._at(Point.SYNCED)
        except BaseException:
            self._remove()
            raise
        return Written(self._files, self._parts, self._texts)

    def _remove(self) -> None:
        for name in self._started:
            with suppress(OSError):  # what made the writing fail is shown, and the next save removes the rest
                self._target.storage.remove(name)

    def _write_tensors(self, files: ExitStack, kind: Kind, parts: Sequence[TensorPart]) -> None:
        if not parts:
            return
        by_key: dict[str, TensorPart] = {}
        for part in parts:  # the key is the name, unless this rank has several parts of a tensor
            by_key[part.name if part.name not in by_key else f"{part.name}#{len(by_key)}"] = part
        file, name = self._create(files, f"{kind}-{self._rank:05d}", "safetensors")
        tensors = {key: part.tensor for key, part in by_key.items()}
        metadata = {"format": "pt", "file": name}  # so that no two files of any saves have the same header
        written = write_tensors(_Counted(file, self._count), tensors, metadata=metadata)
        self._files[name] = StoredFile(written.num_bytes, written.header_xxh3_128)
        for key, part in by_key.items():
            stored = StoredPart(name, key, part.region, written.xxh3_128[key])
            self._parts.append(WrittenPart(part.name, dtype_name(part.tensor, part.name), part.shape, stored))

    def _write_text(self, files: ExitStack, stem: str, content: bytes) -> None:
        file, self._texts[stem] = self._create(files, stem, "json")
        file.write(content)
        self._files[self._texts[stem]] = StoredFile(len(content), xxh3_128(content).hexdigest())

    def _create(self, files: ExitStack, stem: str, ending: str) -> tuple[Any, str]:
        name = f"{stem}-{self._target.save_id}.{ending}"
        self._started.append(name)
        return files.enter_context(self._target.storage.create(name)), name

    def _count(self, num_bytes: int) -> None:
        """Called before bytes of tensors are written."""
        self._check()
        if self._bytes_to_half is not None:
            self._bytes_to_half -= num_bytes
            if self._bytes_to_half < 0:
                self._pass_half()

    def _pass_half(self) -> None:
        if self._bytes_to_half is not None:
            self._bytes_to_half = None
            self._at(Point.HALF_WRITTEN)


@dataclass(frozen=True)
class _Counted:
    """A file that says how many bytes it is about to write."""

    file: BinaryIO
    count: Callable[[int], object]

    def write(self, data: memoryview | bytes) -> None:
        self.count(len(data))
        self.file.write(data)
