"""Where a save writes its files, and how they take the place of what is there.

the path is         files are written into           the commit                           what goes after it
nothing             last.ckpt.tmp-5f2c9a1b/          the folder is renamed
a file, a link      last.ckpt.tmp-5f2c9a1b/          the same, once the file has           last.ckpt.old-5f2c9a1b
                                                     another name: not quite at once
a checkpoint        last.ckpt/                       manifest-5f2c9a1b.json replaces      files that manifest.json
                                                     manifest.json                        doesn't name
remote              last.ckpt/                       manifest.json is put, last           the same
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property

from typing_extensions import override

from lightning_hanayo.checkpoint.format.manifest import MANIFEST
from lightning_hanayo.checkpoint.format.storage import LocalStorage, Storage
from lightning_hanayo.checkpoint.save.folder.points import AtPoint, Point
from lightning_hanayo.checkpoint.save.leftovers import is_checkpoint, is_of_a_save, temporary_path, unnamed_files
from lightning_hanayo.checkpoint.save.removal import remove_next_to
from lightning_hanayo.errors import CheckpointError


class Target(ABC):
    """The folder that a save writes into. All ranks have one; rank 0 calls the methods that change it as a whole.

    Args:
        path: the checkpoint's.
        save_id: eight hexadecimal digits, which the names of this save's files contain.

    Raises:
        OSError: by all methods.
    """

    def __init__(self, path: str, save_id: str) -> None:
        self.path = path
        self.save_id = save_id

    def __getstate__(self) -> dict[str, str]:
        """Each rank opens the folder by itself."""
        return {"path": self.path, "save_id": self.save_id}

    @cached_property
    @abstractmethod
    def storage(self) -> Storage:
        """Where all ranks write."""

    @abstractmethod
    def prepare(self) -> None:
        """Remove what saves that were killed have left, make the folder, and write the marker."""

    @abstractmethod
    def commit(self, manifest: bytes, at: AtPoint) -> None:
        """Write the manifest, and make this save's files the checkpoint."""

    @abstractmethod
    def undo(self) -> None:
        """Remove this save's files, unless they have become the checkpoint."""

    @abstractmethod
    def clean(self) -> None:
        """After the commit: remove what the new checkpoint replaces."""

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


class NewFolder(Target):
    """A local folder that gets its name when it is complete."""

    @cached_property
    @override
    def storage(self) -> LocalStorage:
        return LocalStorage(temporary_path(self.path, "tmp", self.save_id))

    @override
    def prepare(self) -> None:
        LocalStorage(os.path.dirname(self.path)).make_folder()
        remove_next_to(self.path, "tmp")
        self.storage.make_folder()
        self._write(self._marker, b"{}")

    @override
    def commit(self, manifest: bytes, at: AtPoint) -> None:
        self._write(MANIFEST, manifest)
        self.storage.remove(self._marker)
        self.storage.sync()
        at(Point.MANIFEST_READY)
        if os.path.lexists(self.path):
            os.rename(self.path, self._old)
        LocalStorage(self.storage.path).rename(self.path)

    @override
    def undo(self) -> None:
        if os.path.lexists(self._old) and not os.path.lexists(self.path):
            os.rename(self._old, self.path)
        if self.storage.is_folder():
            self.storage.remove_folder()

    @override
    def clean(self) -> None:
        remove_next_to(self.path, "tmp", "old")

    @property
    def _old(self) -> str:
        return temporary_path(self.path, "old", self.save_id)


class RemoteFolder(Target):
    """A folder in which nothing can be renamed: files of several saves are in it, and the manifest says which count."""

    @cached_property
    @override
    def storage(self) -> Storage:
        return Storage.of(self.path)

    @override
    def prepare(self) -> None:
        self.storage.make_folder()
        self.clean()
        self._write(self._marker, b"{}")

    @override
    def commit(self, manifest: bytes, at: AtPoint) -> None:
        at(Point.MANIFEST_READY)
        self._write(MANIFEST, manifest)  # it appears when it is complete

    @override
    def undo(self) -> None:
        self._remove(unnamed_files(self.storage))

    @override
    def clean(self) -> None:
        """Keep this save's files, even if the manifest that is read back were that of before."""
        self._remove(name for name in unnamed_files(self.storage) if self.save_id not in name)

    def _remove(self, names: Iterable[str]) -> None:
        for name in {*names, self._marker}:  # a remote list may not show the marker yet
            self.storage.remove(name)


class UpdatedFolder(RemoteFolder):
    """A local checkpoint that is saved again: there, the manifest is replaced at once."""

    @cached_property
    @override
    def storage(self) -> LocalStorage:
        return LocalStorage(self.path)

    @override
    def commit(self, manifest: bytes, at: AtPoint) -> None:
        ready = f"manifest-{self.save_id}.json"
        self._write(ready, manifest)
        self.storage.sync()
        at(Point.MANIFEST_READY)
        self.storage.replace(ready, MANIFEST)

    @override
    def clean(self) -> None:
        super().clean()
        remove_next_to(self.path, "tmp", "old")


def target_for(path: str, save_id: str) -> Target:
    """Returns where a save to `path` writes.

    Raises:
        CheckpointError: there is a folder that is no checkpoint, or a file where a folder can't take its place.
        OSError: what is there can't be looked at.
    """
    storage = Storage.of(path)
    if not storage.is_local:
        if storage.is_file():
            raise CheckpointError(f"{path} is a file. Remove it, or save under another name.")
        return RemoteFolder(path, save_id)
    path = os.path.abspath(storage.path)
    if os.path.islink(path) or not storage.is_folder():
        return NewFolder(path, save_id)
    names = storage.names()
    if not all(map(is_of_a_save, names)) and not is_checkpoint(storage, names):
        raise CheckpointError(f"{path} is a folder with other files than a checkpoint's. Save under another name.")
    return UpdatedFolder(path, save_id)
