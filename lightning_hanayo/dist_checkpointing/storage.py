"""Opens folders and files for reading and writing: local ones, and remote ones by fsspec (`s3://...`).

Every failure is an OSError, whatever library a remote file system is built on.
"""

import errno
import mmap
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from typing import Any, BinaryIO, final

CHUNK = 8 * 2**20
"""bytes that are read at once"""
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""what file systems of networks and in user space say that don't sync folders"""
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+]+(::|://)")


@final
class LocalStorage:
    """A folder of a local or mounted file system, and the files in it.

    Names are those of files in the folder; "" is the folder itself. Files can be renamed and replaced at once, and are
    mapped into memory. `RemoteStorage` has the same methods.

    Example:
        >>> storage = LocalStorage("checkpoints/last.ckpt")
        >>> with storage.create("a.json") as file:
        ...     file.write(b"{}")
        >>> bytes(storage.read("a.json"))
        b'{}'
    """

    is_local = True

    def __init__(self, path: str) -> None:
        self.path = path

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name) if name else self.path

    def is_folder(self) -> bool:
        """Whether there is a folder at the path."""
        return os.path.isdir(self.path)

    def is_file(self) -> bool:
        """Whether there is a file at the path."""
        return os.path.isfile(self.path)

    def names(self) -> list[str]:
        """Returns the names of the folder's files and subfolders, sorted."""
        return sorted(os.listdir(self.path))

    def sizes(self, names: Collection[str]) -> Mapping[str, int]:
        """Returns the bytes of those of the files that are there; links to other folders count as missing."""
        folder = os.path.realpath(self.path)
        found = {}
        for name in set(names):  # asked for one by one: the list of a network's folder may be an old one
            path = os.path.realpath(self._at(name))
            if os.path.dirname(path) == folder and os.path.isfile(path):
                found[name] = os.path.getsize(path)
        return found

    def read(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        """Returns a range of a file, mapped into memory."""
        with self._open(name) as file:
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
        """Yield a range of a file piece by piece, through one buffer: a piece is valid until the next one."""
        buffer = memoryview(bytearray(max(0, min(CHUNK, stop - start))))
        with self._open(name) as file:
            file.seek(start)
            while start < stop:
                count = file.readinto(buffer[: stop - start])
                if not count:
                    raise OSError(f"{self._at(name)} ends at byte {start}, before {stop}")
                yield buffer[:count]
                start += count

    def _open(self, name: str) -> FileIO:
        """Open a regular file: opening anything else could wait for ever."""
        path = self._at(name)
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(f"{path} is no file")
        return open(path, "rb", buffering=0)

    def make_folder(self) -> None:
        """Make the folder and those above it, if they don't exist."""
        os.makedirs(self.path, exist_ok=True)

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for writing, and sync it at the end."""
        with open(self._at(name), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def replace(self, name: str, new_name: str) -> None:
        """Give a file another name, in place of the file that has it; at once."""
        os.replace(self._at(name), self._at(new_name))
        self.sync()

    def rename(self, path: str) -> None:
        """Give the folder another path, at once, where there is none or an empty folder."""
        os.rename(self.path, path)
        LocalStorage(os.path.dirname(os.path.abspath(path))).sync()
        self.path = path

    def sync(self) -> None:
        """Return when the folder's list of files is on the device, where the file system can tell."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Remove a file. One that isn't there is no error."""
        if os.path.lexists(self._at(name)):
            os.remove(self._at(name))

    def remove_folder(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path)

    def free_bytes(self) -> int:
        """Returns how much room the file system has for this user."""
        return shutil.disk_usage(self.path).free


@final
class RemoteStorage:
    """A folder of any file system that fsspec knows. Nothing there is renamed."""

    is_local = False

    def __init__(self, path: str, file_system: Any, root: str) -> None:
        self.path = path
        self._file_system = file_system
        self._root = root.rstrip("/")

    @contextmanager
    def _fresh(self) -> Iterator[Any]:
        """The file system, without what it remembers of its folders."""
        with _as_os_error(self.path):
            self._file_system.invalidate_cache()
            yield self._file_system

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def is_folder(self) -> bool:
        """Whether there are files under the path."""
        with self._fresh() as files:
            return bool(files.isdir(self._root))

    def is_file(self) -> bool:
        """Whether there is a file at the path."""
        with self._fresh() as files:
            return bool(files.isfile(self._root))

    def names(self) -> list[str]:
        """Returns the names of the folder's files and subfolders, sorted."""
        with self._fresh() as files:
            return sorted(path.rstrip("/").rpartition("/")[2] for path in files.ls(self._root, detail=False))

    def sizes(self, names: Collection[str]) -> Mapping[str, int]:
        """Returns the bytes of those of the files that are there, also of those that a list doesn't show yet."""
        with self._fresh() as files:
            listed = files.ls(self._root, detail=True) if files.isdir(self._root) else ()
            found = {one["name"].rpartition("/")[2]: one["size"] for one in listed if one["type"] == "file"}
            for name in set(names) - found.keys():
                if files.isfile(self._at(name)):
                    found[name] = files.size(self._at(name))
        return {name: found[name] for name in names if name in found}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        """Returns a range of a file, fetched by one request."""
        with _as_os_error(f"{self.path}/{name}"):
            data = memoryview(self._file_system.cat_file(self._at(name), start=start, end=stop))
        if stop is not None and len(data) != stop - start:
            raise OSError(f"{self.path}/{name} ends at byte {start + len(data)}, before {stop}")
        return data

    def chunks(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """Yield a range of a file, a request for each piece."""
        for first in range(start, stop, CHUNK):
            yield self.read(name, first, min(first + CHUNK, stop))

    def make_folder(self) -> None:
        """Make the folder, where the file system has folders."""
        with _as_os_error(self.path):
            self._file_system.makedirs(self._root, exist_ok=True)

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """Open a file for writing. It appears when it is complete."""
        with _as_os_error(f"{self.path}/{name}"), self._file_system.open(self._at(name), "wb") as file:
            yield file

    def replace(self, name: str, new_name: str) -> None:
        """Copy a file over another one, and remove it: not at once."""
        with _as_os_error(f"{self.path}/{name}"):
            self._file_system.mv(self._at(name), self._at(new_name))

    def remove(self, name: str) -> None:
        """Remove a file. One that isn't there is no error."""
        with self._fresh() as files:
            if files.exists(self._at(name)):
                files.rm_file(self._at(name))

    def remove_folder(self) -> None:
        """Remove the folder with all that is in it."""
        with _as_os_error(self.path):
            self._file_system.rm(self._root, recursive=True)

    def free_bytes(self) -> int | None:
        """Returns None: object stores don't say."""
        return None


Storage = LocalStorage | RemoteStorage


def storage_of(path: str | os.PathLike[str]) -> Storage:
    """Returns the storage of a path or of an fsspec URL. Nothing is looked at yet."""
    path = os.fspath(path)
    if not _REMOTE.match(path):
        return LocalStorage(os.path.expanduser(path))  # as fsspec does
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    with _as_os_error(path):
        file_system, root = url_to_fs(path)
    return LocalStorage(root) if isinstance(file_system, LocalFileSystem) else RemoteStorage(path, file_system, root)


@contextmanager
def _as_os_error(where: str) -> Iterator[None]:
    """Inside it, any failure is an OSError: each remote file system has errors of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{where}: {type(error).__name__}: {error}") from error
