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
"""

import json
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar
from warnings import warn

from lightning_hanayo.checkpoint.format.tensor_file import dtype_name
from lightning_hanayo.checkpoint.save.folder.manifest_of import manifest_of
from lightning_hanayo.checkpoint.save.folder.points import AtPoint, Point, go_on
from lightning_hanayo.checkpoint.save.folder.rank_files import RankFiles, Written
from lightning_hanayo.checkpoint.save.folder.target import Target, target_for
from lightning_hanayo.checkpoint.save.part import RankPart
from lightning_hanayo.checkpoint.save.peers import ANOTHER_ENDED, Peers, PeersLost
from lightning_hanayo.checkpoint.save.problems import no_space, problem_of
from lightning_hanayo.errors import CheckpointError, available

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
