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

What one rank writes of a checkpoint: its tensors, its JSON documents, and rank 0 what the manifest says of all.

The ranks that write a checkpoint together, and the collectives that they need.
"""

import errno
import json
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args
from warnings import warn

import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_128

from lightning_hanayo.dist_checkpointing.format import Manifest, StoredFile, StoredPart, WholeTensor
from lightning_hanayo.dist_checkpointing.region import Region, partition_problem
from lightning_hanayo.dist_checkpointing.target import AtPoint, Point, Target, go_on, problem_of, target_for
from lightning_hanayo.dist_checkpointing.tensor_file import dtype_name, write_tensors
from lightning_hanayo.errors import CheckpointError
from lightning_hanayo.pipeline_parallel.object_collectives import all_gather_objects, gather_objects

Kind = Literal["model", "optimizer", "state"]
"""which of a rank's files a tensor is in"""


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor of the single-process model, or all of it.

    Example:
        >>> rows = torch.randn(2, 8)  # rows 2 and 3 of a weight [4, 8]
        >>> TensorPart("model/head.weight", rows, (4, 8), Region((((2, 4),), ((0, 8),))), "model")
    """

    name: str
    """as in the manifest: model/<name>, optimizer/<i>/<parameter>/<key>, gradient/<parameter>, or state/<n>"""
    tensor: Tensor
    """[region.shape], on any device"""
    shape: tuple[int, ...]
    """of the whole tensor"""
    region: Region
    """the entries of the whole that `tensor` holds, in its order"""
    kind: Kind

    @staticmethod
    def whole(name: str, tensor: Tensor, kind: Kind) -> "TensorPart":
        """A tensor that one rank writes alone."""
        return TensorPart(name, tensor, tuple(tensor.shape), Region.whole(tensor.shape), kind)


@dataclass(frozen=True)
class RankPart:
    """What one rank writes. It belongs to the save: only the tensors may change once `Saver.save` has returned.

    No two ranks have the same entries of a tensor, nor documents of the same stem.
    """

    tensors: Sequence[TensorPart] = ()
    texts: Mapping[str, Any] = field(default_factory=dict)
    """JSON documents by the stem of their file: "state", "state-data-00001" """
    about: Mapping[str, Any] = field(default_factory=dict)
    """rank 0's: step, epoch, layout, and what else the manifest says of the whole checkpoint"""


ANOTHER_ENDED = "another rank has ended, or doesn't answer"

_T = TypeVar("_T")


class RanksLost(RuntimeError):
    """A collective has failed: another rank has ended, or doesn't answer. The message is the group's own."""


class SavingRanks:
    """All ranks of the world, seen from one of them. Calls are made by all ranks, in the same order, in one thread.

    Args:
        group: over gloo, and used by nothing else at the same time; None for one process alone.

    Raises:
        RanksLost: by all collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._group = group

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order."""
        return self._call(all_gather_objects, value) if self.num_ranks > 1 else [value]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` on rank 0, and nothing on the others."""
        return self._call(gather_objects, value) if self.num_ranks > 1 else [value]

    def close(self) -> None:
        """Let go of the process group: ranks that wait for this one are woken once nobody holds it."""
        self._group = None

    def _call(self, collective: Callable[[dist.ProcessGroup, Any], _T], value: Any) -> _T:
        if self._group is None:
            raise RanksLost("the run has been abandoned")
        try:
            return collective(self._group, value)
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed meanwhile
            raise RanksLost(str(error).partition("\n")[0]) from error


@dataclass(frozen=True)
class Written:
    """What one rank has written, for the manifest."""

    files: Mapping[str, StoredFile]
    """by name"""
    tensors: Sequence[tuple[str, WholeTensor]]
    """by name, each with one of its parts"""
    texts: Mapping[str, str]
    """the file of each document, by its stem"""


def write_files(
    target: Target, rank: int, part: RankPart, texts: Mapping[str, bytes], at: AtPoint, check: Callable[[], object]
) -> Written:
    """Write one rank's files, and return when they are on the disk. If this raises, no file is left.

    Args:
        target: where.
        rank: this one, which the names of its files with tensors say.
        part: has the tensors.
        texts: its documents, encoded.
        at: is called at HALF_WRITTEN, WRITTEN and SYNCED.
        check: is called again and again while tensors are written; what it raises ends the writing.
    """
    files: dict[str, StoredFile] = {}
    wholes: list[tuple[str, WholeTensor]] = []
    names = {stem: f"{stem}-{target.save_id}.json" for stem in texts}
    started: list[str] = []

    def create(opened: ExitStack, name: str) -> Any:
        started.append(name)
        return opened.enter_context(target.storage.create(name))

    def write_kind(opened: ExitStack, kind: Kind, parts: Sequence[TensorPart]) -> None:
        by_key: dict[str, TensorPart] = {}
        for one in parts:  # the key is the name, unless this rank has several parts of a tensor
            by_key[one.name if one.name not in by_key else f"{one.name}#{len(by_key)}"] = one
        name = f"{kind}-{rank:05d}-{target.save_id}.safetensors"
        tensors = {key: one.tensor for key, one in by_key.items()}
        metadata = {"format": "pt", "file": name}  # so that no two files of any saves have the same header
        files[name], hashes = write_tensors(create(opened, name), tensors, metadata=metadata, check=check)
        for key, one in by_key.items():
            stored = StoredPart(name, key, one.region, hashes[key])
            wholes.append((one.name, WholeTensor(one.shape, dtype_name(one.tensor, one.name), (stored,))))

    try:
        with ExitStack() as opened:  # which syncs them at its end, when the disk has been at work for a while
            for kind in get_args(Kind):
                if parts := [one for one in part.tensors if one.kind == kind]:
                    write_kind(opened, kind, parts)
                if kind == "model":
                    at(Point.HALF_WRITTEN)
            for stem, content in texts.items():
                create(opened, names[stem]).write(content)
                files[names[stem]] = StoredFile(len(content), xxh3_128(content).hexdigest())
            at(Point.WRITTEN)
        at(Point.SYNCED)
    except BaseException:
        for name in started:
            with suppress(OSError):  # what made the writing fail is shown, and the next save removes the rest
                target.storage.remove(name)
        raise
    return Written(files, wholes, names)


_SAVED = "was saved"


class _Result(NamedTuple, Generic[_T]):
    """The result of a step on one rank, for the others."""

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
        self, peers: SavingRanks, path: str, part: RankPart, *, at: AtPoint = go_on, check: Callable[[], object] = int
    ) -> None:
        self._peers = peers
        self._path = self._name = path.rstrip("/")
        self._part = part
        self._at, self._check = at, check
        self._target: Target | None = None
        """rank 0 has chosen it"""
        self._free: int | None = None
        self._needed = 0
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
            target, texts = self._agree_on_target()
            self._at(Point.FOLDER_MADE)
            rank, part = self._peers.rank, self._part
            written = self._attempt(lambda: write_files(target, rank, part, texts, self._at, self._check))
            self._conclude(target, written)
        except BaseException as error:
            if self._peers.rank == 0 and self._target is not None and self._outcome != _SAVED:
                with suppress(OSError):
                    self._target.undo()
            if isinstance(error, RanksLost):
                raise CheckpointError(
                    f"{self._name} {self._outcome}: {ANOTHER_ENDED} ({error}). What can be read there is whole: it is "
                    f"what was there before, or the new checkpoint."
                ) from error
            raise

    def _agree_on_target(self) -> tuple[Target, dict[str, bytes]]:
        """Let rank 0 choose and make the folder, and look at it; return it, and this rank's documents, encoded."""
        texts: dict[str, bytes] = {}

        def begin() -> tuple[Target | None, int]:
            for one in self._part.tensors:
                dtype_name(one.tensor, one.name)  # raises if it can't be stored
            texts.update({stem: json.dumps(one, allow_nan=False).encode() for stem, one in self._part.texts.items()})
            if self._peers.rank == 0:
                self._target = target_for(self._path, secrets.token_hex(4))
                self._target.prepare()
            return self._target, sum(one.tensor.nbytes for one in self._part.tensors) + sum(map(len, texts.values()))

        # a rank that fails takes part all the same: the others wait for it
        begun = self._peers.all_gather((self._attempt(begin), self._part.about.get("step")))
        step = begun[0][1]
        self._name += "" if step is None else f" (step {step})"
        values = self._values([result for result, _ in begun])
        target: Target = values[0][0]
        self._target, self._needed = target, sum(num_bytes for _, num_bytes in values)

        def look() -> None:
            target.check_marker(socket.gethostname())
            self._free = target.storage.free_bytes()
            if self._free is not None and self._needed > self._free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target.folder)

        self._values(self._peers.all_gather(self._attempt(look)))
        return target, texts

    def _conclude(self, target: Target, own: _Result[Written]) -> None:
        if own.problem is None and self._peers.rank > 0:
            self._outcome = "may have been saved, or not"
        results = self._peers.gather(own)
        self._at(Point.GATHERED)
        outcome: Sequence[_Result[None]] = [_Result(problem=one.problem) for one in results]
        written = [one.value for one in results if one.value is not None]
        if self._peers.rank == 0 and len(written) == len(results):
            outcome = [self._attempt(lambda: self._commit(target, written))]
        self._values(self._peers.all_gather(outcome)[0])
        if self._peers.rank > 0:
            self._at(Point.MANIFEST_READY)
            self._at(Point.COMMITTED)
        else:
            try:
                target.clean()
            except OSError as error:
                warn(f"{self._name} was saved, but what it replaces can't be removed: {error}", stacklevel=2)
        self._at(Point.CLEANED)

    def _commit(self, target: Target, written: Sequence[Written]) -> None:
        """Make what all ranks have written the checkpoint. Called by rank 0."""
        manifest = manifest_of(target.save_id, written, self._part.about)
        data = manifest.to_bytes()  # what the reader would refuse isn't written
        self._check()
        target.check_files({name: file.num_bytes for name, file in manifest.files.items()})
        target.commit(data, self._at)
        self._outcome = _SAVED
        self._at(Point.COMMITTED)

    def _attempt(self, step: Callable[[], _T]) -> _Result[_T]:
        """Take a step that fails on this rank alone: the others hear of it when they next wait for all."""
        try:
            return _Result(step())
        except RanksLost:
            raise
        except Exception as error:
            self._error = error
            path = self._path if self._target is None else self._target.folder
            return _Result(problem=problem_of(error, path, self._needed, self._free))

    def _values(self, results: Sequence[_Result[Any]]) -> list[Any]:
        """The values of all ranks' results. Raises the problem of the first rank that has one."""
        for rank, one in enumerate(results):
            if one.problem is not None:
                where = f" (rank {rank})" if self._peers.num_ranks > 1 else ""
                raise CheckpointError(
                    f"{self._name} was not saved: {one.problem}{where}. What was there before is untouched."
                ) from self._error
        return [one.value for one in results]


def manifest_of(save_id: str, written: Sequence[Written], about: Mapping[str, Any]) -> Manifest:
    """Returns the manifest.

    Args:
        save_id: of this save.
        written: by each rank.
        about: what the manifest says of the whole: step, epoch, layout, and anything else.

    Raises:
        CheckpointError: ranks have saved different parts of a tensor than make it up.
    """
    tensors: dict[str, list[WholeTensor]] = defaultdict(list)
    for name, tensor in (pair for one in written for pair in one.tensors):
        tensors[name].append(tensor)
    step, epoch, layout = about.get("step", 0), about.get("epoch", 0), about.get("layout", {})
    rest = {name: value for name, value in about.items() if name not in ("step", "epoch", "layout")}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    files = {name: file for one in written for name, file in one.files.items()}
    texts = {stem: file for one in written for stem, file in one.texts.items()}
    wholes = {name: _whole(name, tensors[name]) for name in sorted(tensors)}
    return Manifest(save_id, step, epoch, created, layout, files, wholes, texts, rest)


def _whole(name: str, found: Sequence[WholeTensor]) -> WholeTensor:
    """The tensor that ranks have written parts of."""
    (shape, dtype), *others = sorted({(one.shape, one.dtype) for one in found})
    parts = tuple(part for one in found for part in one.parts)
    problem = f"also {others[0]}" if others else partition_problem(shape, [part.region for part in parts])
    if problem:
        raise CheckpointError(f"the ranks' parts of {name} {shape}, {dtype}, do not make up the whole: {problem}")
    return WholeTensor(shape, dtype, parts)
