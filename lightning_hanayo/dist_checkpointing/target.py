"""Where a save writes its files, and how they take the place of what is there.

the path is         files are written into           the commit                           what goes after it
nothing             last.ckpt.tmp-5f2c9a1b/          the folder is renamed
a file, a link      last.ckpt.tmp-5f2c9a1b/          the same, once the file has           last.ckpt.old-5f2c9a1b
                                                     another name: not quite at once
a checkpoint        last.ckpt/                       manifest-5f2c9a1b.json replaces      files that manifest.json
                                                     manifest.json                        doesn't name
remote              last.ckpt/                       manifest.json is put, last           the same

Tells what saves have made from other files, and finds what saves that were killed have left.

checkpoints/last.ckpt/manifest.json                       names the files that count
checkpoints/last.ckpt/model-00000-5f2c9a1b.safetensors    named, or of a save that didn't come to its end
checkpoints/last.ckpt.tmp-5f2c9a1b/                       a new checkpoint, until it is complete
checkpoints/last.ckpt.old-5f2c9a1b                        what was there, until it is replaced

Removes a checkpoint: first what makes it one, so that what a kill in between leaves never claims to be whole.

Says why a rank can't write a checkpoint, in one line that all ranks show; and sizes, as people write them.

The points of a save, by which its order of writes is told, tested and stopped.

rank 0        BEGUN  FOLDER_MADE  HALF_WRITTEN  WRITTEN  SYNCED  GATHERED  MANIFEST_READY  COMMITTED  CLEANED
other ranks   BEGUN  FOLDER_MADE  HALF_WRITTEN  WRITTEN  SYNCED  GATHERED  - once rank 0 is at the end: -  CLEANED

Opens folders and files for reading and writing: local ones, and remote ones by fsspec (`s3://...`).

Every failure is an OSError, whatever library a remote file system is built on.
"""

import errno
import mmap
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, final
from warnings import warn

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_hanayo.dist_checkpointing.format import MANIFEST, Manifest, save_id_in
from lightning_hanayo.errors import CheckpointError, HanayoError

CHUNK = 8 * 2**20
"""bytes that are read at once"""
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""what file systems of networks and in user space say that don't sync folders"""
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+]+(::|://)")


@final
class Storage:
    """A folder of any file system that fsspec knows, and the files in it. Nothing is looked at before it is used.

    Names are those of files in the folder; "" is the folder itself. In a local or mounted file system files are mapped
    into memory, and synced, and files and folders get other names at once; nothing else is renamed.

    Args:
        path: of the folder, or an fsspec URL.

    Example:
        >>> storage = Storage("checkpoints/last.ckpt")
        >>> with storage.create("a.json") as file:
        ...     file.write(b"{}")
        >>> bytes(storage.read("a.json"))
        b'{}'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file_system: Any = LocalFileSystem()
        root = self.path
        if _REMOTE.match(self.path):  # no local path that has "::" in it
            with _as_os_error(self.path):
                self._file_system, root = url_to_fs(self.path)
        self.is_local = isinstance(self._file_system, LocalFileSystem)
        if self.is_local:
            self.path = os.path.expanduser(root)
            root = os.path.abspath(self.path)
        self._root = root.rstrip("/")

    @contextmanager
    def _fresh(self, name: str = "") -> Iterator[Any]:
        """The file system, without what it remembers of its folders."""
        with nullcontext() if self.is_local else _as_os_error(f"{self.path}/{name}".rstrip("/")):
            self._file_system.invalidate_cache()
            yield self._file_system

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root or "/"

    def is_folder(self) -> bool:
        """Whether there is a folder at the path."""
        with self._fresh() as files:
            return bool(files.isdir(self._at("")))

    def is_file(self) -> bool:
        """Whether there is a file at the path."""
        with self._fresh() as files:
            return bool(files.isfile(self._at("")))

    def names(self) -> list[str]:
        """Returns the names of the folder's files and subfolders, sorted."""
        with self._fresh() as files:
            return sorted(path.rstrip("/").rpartition("/")[2] for path in files.ls(self._at(""), detail=False))

    def sizes(self, names: Collection[str]) -> Mapping[str, int]:
        """Returns the bytes of those of the files that are there, also of those that a list doesn't show yet.

        Links in a local folder count as missing.
        """
        with self._fresh() as files:
            listed = files.ls(self._at(""), detail=True) if files.isdir(self._at("")) else ()
            found = {one["name"].rpartition("/")[2]: one["size"] for one in listed if one["type"] == "file"}
            for name in set(names) - found.keys():
                if files.isfile(self._at(name)) and not (self.is_local and os.path.islink(self._at(name))):
                    found[name] = files.size(self._at(name))
        return {name: found[name] for name in names if name in found}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        """Returns a range of a file: mapped into memory if it is local, else fetched by one request."""
        if not self.is_local:
            return self._fetched(name, start, stop)
        with open(self._at(name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            stop = size if stop is None else stop
            if stop > size:
                raise OSError(f"{self._at(name)} ends at byte {size}, before {stop}")
            if start >= stop:
                return memoryview(b"")
            page = start - start % mmap.ALLOCATIONGRANULARITY  # maps begin at pages
            mapped = mmap.mmap(file.fileno(), stop - page, access=mmap.ACCESS_READ, offset=page)
        return memoryview(mapped)[start - page :]

    def chunks(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """Yield a range of a file piece by piece, not mapped: there a disk's error is no exception."""
        for first in range(start, stop, CHUNK):
            yield self._fetched(name, first, min(first + CHUNK, stop))

    def _fetched(self, name: str, start: int, stop: int | None) -> memoryview:
        with _as_os_error(f"{self.path}/{name}"):
            data = memoryview(self._file_system.cat_file(self._at(name), start=start, end=stop))
        if stop is not None and len(data) != stop - start:
            raise OSError(f"{self.path}/{name} ends at byte {start + len(data)}, before {stop}")
        return data

    def make_folder(self) -> None:
        """Make the folder and those above it, if they don't exist, where the file system has folders."""
        with self._fresh() as files:
            files.makedirs(self._at(""), exist_ok=True)

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """Open a file for writing. A local one is synced at the end; a remote one appears when it is complete."""
        with self._fresh(name) as files, files.open(self._at(name), "wb") as file:
            yield file
            if self.is_local:
                file.flush()
                os.fsync(file.fileno())

    def replace(self, name: str, new_name: str) -> None:
        """Give a file another name, in place of the file that has it: at once if it is local, else by a copy."""
        with self._fresh(name) as files:
            move = os.replace if self.is_local else files.mv
            move(self._at(name), self._at(new_name))
        self.sync()

    def rename(self, path: str) -> None:
        """Give the local folder another path, at once, where there is none or an empty folder."""
        os.rename(self._root, path)
        Storage(os.path.dirname(os.path.abspath(path))).sync()

    def sync(self) -> None:
        """Return when the folder's list of files is on the device, where the file system can tell."""
        if not self.is_local:
            return
        descriptor = os.open(self._at(""), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Remove a file. One that isn't there is no error."""
        with self._fresh(name) as files:
            if files.lexists(self._at(name)):
                files.rm_file(self._at(name))

    def remove_folder(self) -> None:
        """Remove the folder with all that is in it."""
        with self._fresh() as files:
            files.rm(self._at(""), recursive=True)

    def free_bytes(self) -> int | None:
        """Returns how much room the file system has for this user; None: a remote one doesn't say."""
        return shutil.disk_usage(self._at("")).free if self.is_local else None


@contextmanager
def _as_os_error(where: str) -> Iterator[None]:
    """Inside it, any failure is an OSError: each remote file system has errors of its own."""
    try:
        yield
    except (OSError, HanayoError):
        raise
    except Exception as error:
        raise OSError(f"{where}: {type(error).__name__}: {error}") from error


_FILE = re.compile(r"(model|optimizer|state|manifest|marker)(-[a-z0-9-]+)?-[0-9a-f]{8}\.(safetensors|json)")
_BESIDE = re.compile(r"\.(tmp|old)-[0-9a-f]{8}")


def is_of_a_save(name: str) -> bool:
    """Whether a file in a checkpoint's folder has the name of one that saves write."""
    return name == MANIFEST or _FILE.fullmatch(name) is not None


def is_checkpoint(names: Collection[str]) -> bool:
    """Whether a folder with files of these names is a checkpoint, which may be damaged."""
    return MANIFEST in names and any(map(_FILE.fullmatch, names))


def unnamed_files(storage: Storage) -> list[str]:
    """Returns the files of other saves than the one that has written the folder's manifest.

    There are none if the manifest can't be read, because they may be its own.
    """
    written = [name for name in storage.names() if _FILE.fullmatch(name)] if storage.is_folder() else []
    if not written or not storage.sizes([MANIFEST]):
        return written
    try:
        save_id = save_id_in(bytes(storage.read(MANIFEST)), storage.path)
    except CheckpointError:
        return []
    return [name for name in written if f"-{save_id}." not in name]


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
    """Returns the paths of what saves have made next to a local checkpoint."""
    parent, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(parent):
        return []
    name = _without_number(name)
    matches = {one: _BESIDE.fullmatch(one[len(name) :]) for one in os.listdir(parent) if one.startswith(name)}
    return [os.path.join(parent, one) for one, match in sorted(matches.items()) if match and match[1] in kinds]


def remove_checkpoint(path: str) -> None:
    """Remove the folder or the file that a save has written, with what killed saves have left. One process calls it.

    Of a link only the link is removed. Files of others in the folder stay, and a warning names them; so does what
    can't be removed. What isn't there is removed already.
    """
    storage = Storage(path.rstrip("/"))
    try:
        if storage.is_local:
            remove_next_to(storage.path, "tmp", "old")
        if storage.is_file() or (storage.is_local and os.path.islink(storage.path)):
            storage.remove("")
        elif storage.is_folder():
            _remove_folder(storage)
    except OSError as error:
        warn(f"{path} can't be removed: {error}", stacklevel=2)


def _remove_folder(storage: Storage) -> None:
    names = {*storage.names(), *storage.sizes([MANIFEST])}
    if not storage.is_local and MANIFEST in names:  # a list may not show all files yet that the manifest names
        with suppress(CheckpointError):
            names |= Manifest.from_bytes(bytes(storage.read(MANIFEST)), storage.path).files.keys()
    is_ours = is_checkpoint(names) or MANIFEST not in names
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
            _remove_folder(Storage(one))


UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FULL = (errno.ENOSPC, errno.EDQUOT)


def problem_of(error: Exception, path: str, needed: int | None = None, free: int | None = None) -> str:
    """Returns what is wrong, without a full stop.

    Args:
        error: what a step has raised.
        path: where it wrote, for errors that don't say it.
        needed: bytes to write.
        free: bytes that were free before.
    """
    if isinstance(error, HanayoError):
        return str(error).rstrip(".")
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    if error.errno in _FULL:
        sizes = "" if not needed else f": {size_text(needed)} are needed"
        sizes += "" if free is None or not sizes else f", {size_text(free)} were free"
        return f"no space left in {path}{sizes}"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return f"{str(error.filename or path).rstrip('/')} is a file, and no folder"
    return f"{error.filename or path} can't be written: {error.strerror or f'{type(error).__name__}: {error}'}"


def size_text(num_bytes: int) -> str:
    """A size in the largest unit that it has one of.

    Example:
        >>> size_text(1_500_000)
        '1.5 MB'
    """
    unit = max((unit for unit, size in UNITS.items() if size <= num_bytes), key=UNITS.__getitem__, default="B")
    return f"{num_bytes / UNITS[unit]:.{1 if unit != 'B' else 0}f} {unit}"


class Point(IntEnum):
    """What a rank has just done. A process that ends at any of them leaves the checkpoint of before, or the new one."""

    BEGUN = 1
    FOLDER_MADE = 2
    """and this rank sees it"""
    HALF_WRITTEN = 3
    """the model's tensors, and not the optimizer's"""
    WRITTEN = 4
    SYNCED = 5
    """its files are on the disk"""
    GATHERED = 6
    """rank 0 knows that all ranks' files are there"""
    MANIFEST_READY = 7
    """it is on the disk, under another name"""
    COMMITTED = 8
    """the new checkpoint is the one that is read"""
    CLEANED = 9
    """what it replaces is gone"""


AtPoint = Callable[[Point], object]


def go_on(point: Point) -> None:
    """Do nothing at a point."""


@dataclass
class Target:
    """The folder that a save writes into. All ranks have one; rank 0 calls the methods that change it as a whole.

    Raises:
        OSError: by all methods.
    """

    path: str
    """the checkpoint's"""
    save_id: str
    """eight hexadecimal digits, which the names of this save's files contain"""
    folder: str
    """where all ranks write: next to the path what is new, else the path itself"""

    @property
    def storage(self) -> Storage:
        """The folder, opened anew: each rank gets the target of rank 0."""
        return Storage(self.folder)

    def prepare(self) -> None:
        """Remove what saves that were killed have left, make the folder, and write the marker."""
        storage, is_new = self.storage, self.folder != self.path
        if storage.is_local:
            Storage(os.path.dirname(self.path)).make_folder()
            remove_next_to(self.path, *(("tmp",) if is_new else ("tmp", "old")))  # "old" may be the only checkpoint
        storage.make_folder()
        self._remove(unnamed_files(storage))
        self._write(self._marker, b"{}")

    def commit(self, manifest: bytes, at: AtPoint) -> None:
        """Write the manifest, and make this save's files the checkpoint."""
        storage = self.storage
        if not storage.is_local:
            at(Point.MANIFEST_READY)
            self._write(MANIFEST, manifest)  # it appears when it is complete
            return
        ready = f"manifest-{self.save_id}.json"
        self._write(ready, manifest)
        storage.remove(self._marker)
        storage.sync()  # the names of all files, before the one that counts
        at(Point.MANIFEST_READY)
        storage.replace(ready, MANIFEST)
        if self.folder != self.path:
            if os.path.lexists(self.path):
                os.rename(self.path, self._old)
            storage.rename(self.path)
            self.folder = self.path

    def undo(self) -> None:
        """Remove this save's files, unless they have become the checkpoint."""
        storage = self.storage
        if self.folder == self.path:
            self._remove(unnamed_files(storage))
            return
        if os.path.lexists(self._old) and not os.path.lexists(self.path):
            os.rename(self._old, self.path)
        if storage.is_folder():
            storage.remove_folder()

    def clean(self) -> None:
        """After the commit: remove what the new checkpoint replaces."""
        storage = self.storage
        # the manifest that is read back may be that of before, by which this save's files are unnamed
        self._remove(name for name in unnamed_files(storage) if self.save_id not in name)
        if storage.is_local:
            remove_next_to(self.path, "tmp", "old")

    def check_marker(self, host: str) -> None:
        """Called by all ranks, before anything large is written.

        Raises:
            CheckpointError: this host doesn't see what rank 0 has written.
        """
        try:
            self.storage.read(self._marker)
        except OSError:
            raise CheckpointError(
                f"{host} does not see {self.storage.path}, which rank 0 has made. All ranks must see the same folder: "
                f"save to a file system that all nodes share"
            ) from None

    def check_files(self, num_bytes: Mapping[str, int]) -> None:
        """Called just before the commit, with the bytes of all files that ranks have written.

        Raises:
            CheckpointError: one isn't there as it was written, because another run saves to this path, or removes it.
        """
        sizes = self.storage.sizes(num_bytes)
        for name, expected in num_bytes.items():
            if sizes.get(name) != expected:
                found = f"has {sizes[name]} instead of {expected} bytes" if name in sizes else "has disappeared"
                raise CheckpointError(
                    f"{self.storage.path}/{name} {found} since it was written. Does another run save to this path, or "
                    f"remove what is there? Give each run a folder of its own"
                )

    @property
    def _marker(self) -> str:
        return f"marker-{self.save_id}.json"

    def _write(self, name: str, content: bytes) -> None:
        with self.storage.create(name) as file:
            file.write(content)

    @property
    def _old(self) -> str:
        return temporary_path(self.path, "old", self.save_id)

    def _remove(self, names: Iterable[str]) -> None:
        for name in {*names, self._marker}:  # a remote list may not show the marker yet
            self.storage.remove(name)


def target_for(path: str, save_id: str) -> Target:
    """Returns where a save to `path` writes.

    Raises:
        CheckpointError: there is a folder that is no checkpoint, or a file where a folder can't take its place.
        OSError: what is there can't be looked at.
    """
    storage = Storage(path)
    if not storage.is_local:
        if storage.is_file():
            raise CheckpointError(f"{path} is a file. Remove it, or save under another name.")
        return Target(path, save_id, path)
    path = os.path.abspath(storage.path)
    if os.path.islink(path) or not storage.is_folder():
        return Target(path, save_id, temporary_path(path, "tmp", save_id))
    check_replaceable(storage)
    return Target(path, save_id, path)


def check_replaceable(storage: Storage) -> None:
    """Raises a CheckpointError if a folder is no checkpoint: a save would remove what others have put there."""
    names = storage.names()
    if not all(map(is_of_a_save, names)) and not is_checkpoint(names):
        raise CheckpointError(
            f"{storage.path} is a folder with other files than a checkpoint's. Save under another name."
        )
