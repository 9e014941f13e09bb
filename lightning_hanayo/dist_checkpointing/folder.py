"""Opens a checkpoint folder: checks which files are there, reads tensors or regions of them, and documents.

Opening, verifying and reading documents needs no torch.

Verifies a checkpoint on all ranks together: each hashes its share, and all hear what one has found.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

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
from lightning_hanayo.dist_checkpointing.storage import storage_of
from lightning_hanayo.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_hanayo.dist_checkpointing.read_tensor import StoredTensor

_OF_TORCH = ".metadata"
"""in folders of `torch.distributed.checkpoint`"""
_TEMPORARY = ".tmp-"
"""stands between the name of a checkpoint and the id of the save that is writing it"""
_HEADER_BYTES = 2**16
"""Most headers are shorter, and take one request."""
_Range = tuple[int, int, str]
"""where a part begins and ends in its file, in bytes, and its key"""


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
        self._storage = storage_of(path)
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
        from lightning_hanayo.dist_checkpointing.read_tensor import read_region

        tensor = self.manifest.tensors[name]
        return read_region(tensor, Region.whole(tensor.shape) if region is None else region, self._part_bytes)

    def stored(self, name: str) -> "StoredTensor":
        """Returns a tensor of the checkpoint that is read when it is used. Raises as `read` does."""
        from lightning_hanayo.dist_checkpointing.read_tensor import StoredTensor
        from lightning_hanayo.dist_checkpointing.tensor_file import DTYPES

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
            ranges = sorted((entry.start, entry.stop, key) for key, entry in header.items() if key in wanted)
            for parts in _adjacent(ranges):
                with self._readable(file):
                    self._verify_adjacent(file, parts)

    def header(self, file: str) -> Mapping[str, HeaderEntry]:
        """Returns where a file has its tensors, by key, in order. Its hash is checked before it is looked at."""
        if file not in self._headers:
            with self._readable(file):
                self._headers[file] = self._read_header(file)
        return self._headers[file]

    def _verify_adjacent(self, file: str, parts: Sequence[_Range]) -> None:
        """Read parts that follow each other in a file at one go, and compare the hash of each."""
        chunks = self._storage.chunks(file, parts[0][0], parts[-1][1])
        chunk = memoryview(b"")
        for start, stop, key in parts:
            hashed, missing = xxh3_128(), stop - start
            while missing:
                chunk = chunk or next(chunks)
                hashed.update(chunk[:missing])
                chunk, missing = chunk[missing:], max(0, missing - len(chunk))
            one = self.parts[file][key]
            if hashed.hexdigest() != one.part.xxh3_128:
                raise damaged(self.where(file), f"the values of {one.name} aren't those that were saved")

    def _part_bytes(self, part: StoredPart, start: int, stop: int) -> memoryview:
        """A range of a part's bytes, counted from its first one."""
        entry = self.header(part.file)[part.key]
        with self._readable(part.file):
            return self._storage.read(part.file, entry.start + start, entry.start + stop)

    def _read_header(self, file: str) -> dict[str, HeaderEntry]:
        num_bytes = self.manifest.files[file].num_bytes
        try:
            data = bytes(self._storage.read(file, 0, min(_HEADER_BYTES, num_bytes)))
            length = header_length(data, num_bytes)
            data = data[:length] if length <= len(data) else bytes(self._storage.read(file, 0, length))
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
        if _TEMPORARY in os.path.basename(self.path.rstrip("/")):
            return (
                f"{self.path} is what a save that was interrupted has left, and not whole. Use "
                f"{self.path.rpartition(_TEMPORARY)[0]}, if it is there, or an earlier checkpoint."
            )
        if self._storage.sizes([_OF_TORCH]):
            return (
                f"{self.path} is a folder of torch.distributed.checkpoint, as FSDPStrategy saves shards. Make one "
                f"file of it, python -m lightning.pytorch.utilities.consolidate_checkpoint {self.path}, and load that."
            )
        if self._storage.is_folder():
            return (
                f"{self.path} has no {MANIFEST}: it is no checkpoint of HanayoStrategy, or the save that was "
                f"writing it was interrupted. Use an earlier checkpoint."
            )
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


def _adjacent(ranges: Iterable[_Range]) -> list[list[_Range]]:
    """Ranges in order, those together that follow each other without a gap."""
    groups: list[list[_Range]] = []
    for one in ranges:
        if groups and groups[-1][-1][1] == one[0]:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


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
