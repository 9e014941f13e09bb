"""The commit protocol: all ranks write, then rank 0 makes what they wrote the checkpoint, or all raise one error.

     rank 0                                            other ranks
     chooses the target, makes its folder
     ------------------------------ all-gather: the target, bytes to write ------------------------------
     is there room?                                    is the folder the same?
     ------------------------------------- all-gather: problems ----------------------------------------
     writes, hashes and syncs its files                the same
     ------------------------------------- gather: what was written ------------------------------------
     manifest.json, rename or replace
     ------------------------------------- all-gather: the outcome -------------------------------------
     removes what is replaced

Until the rename or replace, what is read is the checkpoint of before; then it is the new one. A rank that fails takes
part to the end, so that no other waits for it.

Puts together what all ranks have written, and checks that it is a whole checkpoint.

Writes the files of one rank: a safetensors file for each kind of tensors, and its JSON documents.
"""

import json
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, BinaryIO, Generic, TypeVar, get_args
from warnings import warn

from xxhash import xxh3_128

from lightning_hanayo.dist_checkpointing.format import Manifest, StoredFile, StoredPart, WholeTensor
from lightning_hanayo.dist_checkpointing.part import ANOTHER_ENDED, Kind, Peers, PeersLost, RankPart, TensorPart
from lightning_hanayo.dist_checkpointing.region import partition_problem
from lightning_hanayo.dist_checkpointing.target import AtPoint, Point, Target, go_on, no_space, problem_of, target_for
from lightning_hanayo.dist_checkpointing.tensor_file import dtype_name, write_tensors
from lightning_hanayo.errors import CheckpointError, available


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


_T = TypeVar("_T")
_SAVED = "was saved"


@dataclass(frozen=True)
class _Result(Generic[_T]):
    """What came of a step of one rank, as the others hear of it."""

    value: _T | None = None
    problem: str | None = None


class FolderSave:
    """One save of one rank. All ranks make it with the same path, and call `run`.

    Args:
        peers: all ranks.
        path: of the checkpoint, on a file system that all ranks see.
        part: what this rank writes.
        at: is called at each point.
        check: is called again and again while there is something to write; what it raises ends the save on all ranks.
    """

    def __init__(
        self, peers: Peers, path: str, part: RankPart, *, at: AtPoint = go_on, check: Callable[[], object] = int
    ) -> None:
        self._peers = peers
        self._path = path.rstrip("/")
        self._part = part
        self._at, self._check = at, check
        self._target: Target | None = None
        self._free: int | None = None
        self._needed = 0
        self._step: int | None = None
        self._error: Exception | None = None
        self._outcome = "was not saved"
        """as far as this rank knows; for the message if other ranks are lost"""

    def run(self) -> None:
        """Save.

        Raises:
            CheckpointError: on all ranks alike, if one of them can't write; also if a rank ends meanwhile.
        """
        try:
            self._at(Point.BEGUN)
            texts = self._agree_on_target()
            self._at(Point.FOLDER_MADE)
            self._conclude(self._attempt(lambda: self._write(texts)))
        except BaseException as error:
            if self._peers.rank == 0 and self._target is not None and self._outcome != _SAVED:
                with suppress(OSError):
                    self._target.undo()
            if isinstance(error, PeersLost):
                raise CheckpointError(
                    f"{self._name} {self._outcome}: {ANOTHER_ENDED} ({error}). What can be read there is whole: it is "
                    f"what was there before, or the new checkpoint."
                ) from error
            raise

    def _agree_on_target(self) -> Mapping[str, bytes]:
        """Let rank 0 choose and make the folder, and look at it; return this rank's documents."""
        own = self._attempt(self._encoded)
        texts = own.value or {}
        chosen = self._attempt(self._choose) if self._peers.rank == 0 else _Result[Target]()
        num_bytes = self._part.num_bytes + sum(map(len, texts.values()))
        gathered = self._peers.all_gather((chosen, own.problem, num_bytes, self._part.about.get("step")))
        self._step = gathered[0][-1]
        if self._peers.rank > 0:
            self._target = gathered[0][0].value
        self._needed = sum(one[2] for one in gathered)
        self._raise(_first(one.problem or problem for one, problem, *_ in gathered))
        self._raise(_first(self._peers.all_gather(self._attempt(self._look).problem)))
        return texts

    def _encoded(self) -> Mapping[str, bytes]:
        """Returns the documents as JSON, once it is known that the tensors can be stored, too."""
        for one in self._part.tensors:
            dtype_name(one.tensor, one.name)  # raises if it can't be stored
        return {stem: json.dumps(one, allow_nan=False).encode() for stem, one in self._part.texts.items()}

    def _choose(self) -> Target:
        self._target = target_for(self._path, secrets.token_hex(4))
        self._target.prepare()
        return self._target

    def _look(self) -> None:
        """Check that this rank sees the folder, and that there is room for the files of all ranks."""
        target = available(self._target, "rank 0 has sent it")
        target.check_marker(socket.gethostname())
        self._free = target.storage.free_bytes()
        if self._free is not None and self._needed > self._free:
            raise no_space(target.storage.path)

    def _write(self, texts: Mapping[str, bytes]) -> Written:
        target = available(self._target, "rank 0 has sent it")
        return RankFiles(target, self._peers.rank, self._at, self._check).write(self._part.tensors, texts)

    def _conclude(self, own: _Result[Written]) -> None:
        if own.problem is None and self._peers.rank > 0:
            self._outcome = "may have been saved, or not"
        results = self._peers.gather(own)
        self._at(Point.GATHERED)
        failed = _first(result.problem for result in results)
        if failed is None and self._peers.rank == 0:
            problem = self._attempt(lambda: self._commit([one.value for one in results if one.value])).problem
            failed = None if problem is None else (0, problem)
        self._raise(self._peers.all_gather(failed)[0])
        if self._peers.rank > 0:
            self._at(Point.MANIFEST_READY)
            self._at(Point.COMMITTED)
        else:
            self._clean()
        self._at(Point.CLEANED)

    def _commit(self, written: Sequence[Written]) -> None:
        """Make what all ranks have written the checkpoint. Called by rank 0."""
        target = available(self._target, "rank 0 has chosen it")
        manifest = manifest_of(target.save_id, written, self._part.about)
        data = manifest.to_bytes()  # what the reader would refuse isn't written
        self._check()
        target.check_files({name: file.num_bytes for name, file in manifest.files.items()})
        target.commit(data, self._at)
        self._outcome = _SAVED
        self._at(Point.COMMITTED)

    def _clean(self) -> None:
        try:
            available(self._target, "rank 0 has chosen it").clean()
        except OSError as error:
            warn(f"{self._name} was saved, but what it replaces can't be removed: {error}", stacklevel=2)

    @property
    def _name(self) -> str:
        return self._path if self._step is None else f"{self._path} (step {self._step})"

    def _attempt(self, step: Callable[[], _T]) -> _Result[_T]:
        """Take a step that fails on this rank alone: the others hear of it when they next wait for all."""
        try:
            return _Result(step())
        except PeersLost:
            raise
        except Exception as error:
            self._error = error
            path = self._path if self._target is None else self._target.storage.path
            return _Result(problem=problem_of(error, path, self._needed, self._free))

    def _raise(self, failed: tuple[int, str] | None) -> None:
        if failed is not None:
            rank, problem = failed
            where = f" (rank {rank})" if self._peers.num_ranks > 1 else ""
            raise CheckpointError(
                f"{self._name} was not saved: {problem}{where}. What was there before is untouched."
            ) from self._error


def _first(problems: Iterable[str | None]) -> tuple[int, str] | None:
    """The first rank that has a problem, and which."""
    return next(((rank, problem) for rank, problem in enumerate(problems) if problem is not None), None)


def manifest_of(save_id: str, written: Sequence[Written], about: Mapping[str, Any]) -> Manifest:
    """Returns the manifest.

    Args:
        save_id: of this save.
        written: by each rank.
        about: what the manifest says of the whole: step, epoch, layout, and anything else.

    Raises:
        CheckpointError: ranks have saved different parts of a tensor than make it up.
    """
    parts: dict[str, list[WrittenPart]] = defaultdict(list)
    for part in (part for one in written for part in one.parts):
        parts[part.name].append(part)
    rest = dict(about)
    return Manifest(
        save_id=save_id,
        step=rest.pop("step", 0),
        epoch=rest.pop("epoch", 0),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        layout=rest.pop("layout", {}),
        files={name: file for one in written for name, file in one.files.items()},
        tensors={name: _whole(name, parts[name]) for name in sorted(parts)},
        texts={stem: file for one in written for stem, file in one.texts.items()},
        about=rest,
    )


def _whole(name: str, parts: Sequence[WrittenPart]) -> WholeTensor:
    """The tensor that ranks have written parts of."""
    kinds = {(part.shape, part.dtype) for part in parts}
    (shape, dtype), *others = sorted(kinds)
    problem = f"also {others[0]}" if others else partition_problem(shape, [part.stored.region for part in parts])
    if problem:
        raise CheckpointError(f"the ranks' parts of {name} {shape}, {dtype}, do not make up the whole: {problem}")
    return WholeTensor(shape, dtype, tuple(part.stored for part in parts))
