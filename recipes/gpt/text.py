"""Text: the documents a recipe trains on, in an order that is the same on every machine and in every process."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo"}


def documents(path: str | list[str] | None, pattern: str, max_bytes: int) -> list[str]:
    """The documents under `path`, in name order, until `max_bytes` are read; without a path, Python's own library.

    Raises:
        ValueError: a path doesn't exist, or no document is found.
    """
    texts: list[str] = []
    left = max_bytes
    for file in _library() if path is None else _files(path, pattern):
        content = file.read_bytes()[:left]
        left -= len(content)
        texts.append(content.decode("utf-8", errors="ignore"))
        if left <= 0:
            break
    if not any(texts):
        raise ValueError(f"no text found in {path}: give files, or a folder with files that match pattern={pattern!r}")
    return texts


def _library() -> Iterator[Path]:
    """The source files of Python's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = (file.relative_to(root) for file in root.rglob("*.py"))
    for name in sorted(name.as_posix() for name in relative if SKIPPED.isdisjoint(name.parts)):
        yield root / name


def _files(path: str | list[str], pattern: str) -> Iterator[Path]:
    """The files that `path` names, and those in the folders that it names."""
    for place in [Path(path)] if isinstance(path, str) else [Path(part) for part in path]:
        if place.is_dir():
            yield from sorted(file for file in place.glob(pattern) if file.is_file())
        elif place.is_file():
            yield place
        else:
            raise ValueError(f"there is no file or folder {str(place)!r} to read text from")
