"""Settings of the tests of checkpoints."""

from collections.abc import Iterator

import pytest
from fsspec.implementations.memory import MemoryFileSystem


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    """Each test finds no files at `memory://`, which all tests of a process share."""
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
