"""An object store for fsspec that all processes of a test see: its objects are files of a local folder.

objects:///tmp/pytest-0/checkpoints/last.ckpt/manifest.json

An object appears when its file is closed, as with S3; there are no folders, and nothing can be renamed.
"""

import io
import os
import secrets
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem


class ObjectStore(AbstractFileSystem):
    """What this package uses of a file system. `register` makes its URLs known to fsspec in this process."""

    protocol = "objects"

    @classmethod
    def register(cls) -> None:
        """Make its URLs known."""
        fsspec.register_implementation(cls.protocol, cls, clobber=True)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return _Upload(Path(path)) if "w" in mode else open(path, "rb")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Objects, and the next part of longer names, as folders."""
        path = self._strip_protocol(path)
        if os.path.isfile(path):
            found = [self.info(path)]
        elif _objects_under(path):
            found = [self.info(f"{path.rstrip('/')}/{name}") for name in os.listdir(path)]
        else:
            raise FileNotFoundError(path)
        return found if detail else [one["name"] for one in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size and type."""
        path = self._strip_protocol(path).rstrip("/")
        if os.path.isfile(path):
            return {"name": path, "size": os.path.getsize(path), "type": "file"}
        if _objects_under(path):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        os.remove(path)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy an object."""
        _put(Path(path2), Path(path1).read_bytes())

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: there are no folders."""


class _Upload(io.BytesIO):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            _put(self._path, self.getvalue())
        super().close()


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    uploaded = path.parent.parent / f"upload-{secrets.token_hex(8)}"
    uploaded.write_bytes(content)
    os.replace(uploaded, path)


def _objects_under(path: str) -> bool:
    return any(files for _, _, files in os.walk(path))
