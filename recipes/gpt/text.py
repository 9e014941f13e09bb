"""Reads the documents that a recipe trains on, in the same order on every machine and in every process."""

import os
import sysconfig
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

# Tests, installed packages, and character tables, which are poor training text.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


def places(path: str | list[str] | None) -> list[Path] | None:
    """The files and folders that `path` names; None for Python's own library.

    Raises:
        ValueError: one of them doesn't exist.
    """
    if path is None:
        return None
    named = [Path(path)] if isinstance(path, str) else [Path(part) for part in path]
    for place in named:
        if not place.exists():
            raise ValueError(f"there is no file or folder {str(place)!r} to read text from")
    return named


def documents(places: list[Path] | None, pattern: str, max_bytes: int) -> list[str]:
    """The documents in `places`, folders in name order, until `max_bytes` are read; without places, Python's library.

    Raises:
        ValueError: there is no text in them.
    """
    texts: list[str] = []
    left = max_bytes
    for file in _library() if places is None else _files(places, pattern):
        content = file.read_bytes()[:left]
        left -= len(content)
        texts.append(content.decode("utf-8", errors="ignore"))
        if left <= 0:
            break
    if not any(texts):
        where = ", ".join(map(str, places or []))
        raise ValueError(f"no text found in {where}: give files, or a folder with files that match pattern={pattern!r}")
    return texts


def _library() -> Iterator[Path]:
    """The source files of Python's standard library, shuffled by a hash of their names.

    So every part of the text, also the validation part at its end, is a fair sample of the whole.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = (file.relative_to(root).as_posix() for file in _sources(root))
    for name in sorted(names, key=lambda name: sha256(name.encode()).digest()):
        yield root / name


def _sources(root: Path) -> Iterator[Path]:
    """The source files below `root`, without entering skipped folders, which can hold many files."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _files(places: list[Path], pattern: str) -> Iterator[Path]:
    """The files among `places` and those in their folders."""
    for place in places:
        if place.is_dir():
            yield from sorted(file for file in place.glob(pattern) if file.is_file())
        else:
            yield place
