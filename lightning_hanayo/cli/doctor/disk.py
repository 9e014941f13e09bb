"""The folders where runs write: free space, speed, and whether files can be synced and renamed as checkpoints need."""

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

from lightning_hanayo.checkpoint.format.storage import LocalStorage, Storage
from lightning_hanayo.cli.doctor.finding import GIB, Finding, gibibytes

_TOPIC = "disk"
_BYTES = 16 * 2**20
"""that are written to measure the speed"""
_SLOW = 20 * 2**20
"""bytes per second below which saves are felt"""


def examine(root: str) -> Iterator[Finding]:
    """Look at the folder of checkpoints and logs, and at that of temporary files.

    Args:
        root: the Trainer's default_root_dir, which need not be there so far.
    """
    places = {"default_root_dir": root, "TMPDIR": tempfile.gettempdir()}
    for what, path in places.items():
        storage = Storage.of(path)
        if storage.is_local:
            yield from examine_folder(what, _existing(os.path.abspath(storage.path)))
        else:
            yield Finding(_TOPIC, what, f"{path}, which isn't looked at")


def examine_folder(what: str, path: str) -> Iterator[Finding]:
    """Look at one local folder. What is written for it is removed."""
    storage = LocalStorage(path)
    free = storage.free_bytes()
    if free is not None:
        advice = "make room: a checkpoint takes 12 to 16 bytes per parameter, twice while it is replaced"
        yield Finding(_TOPIC, what, f"{path}: {gibibytes(free)} free").flagged_if(free < GIB, "problem", advice)
    name = f".hanayo-doctor-{uuid.uuid4().hex[:8]}"
    try:
        seconds = _write(storage, name)
    except OSError as error:
        advice = "choose a folder that you may write to, on a file system that renames files"
        yield Finding(_TOPIC, f"writing to {what}", f"{path}: {error.strerror or error}", "problem", advice)
        return
    finally:
        for left in (name, f"{name}.new"):
            with suppress(OSError):
                storage.remove(left)
    speed = _BYTES / max(seconds, 1e-6)
    advice = "HanayoStrategy(save_async=True) lets training go on while a checkpoint is written"
    written = Finding(_TOPIC, f"writing to {what}", f"{gibibytes(speed)}/s, synced and renamed")
    yield written.flagged_if(speed < _SLOW, "note", advice)


def _write(storage: LocalStorage, name: str) -> float:
    """Write as a save does: under another name, synced, renamed; returns the seconds of writing."""
    start = time.perf_counter()
    with storage.create(f"{name}.new") as file:
        file.write(os.urandom(2**20) * (_BYTES // 2**20))
    storage.replace(f"{name}.new", name)
    seconds = time.perf_counter() - start
    if storage.sizes([name]) != {name: _BYTES}:
        raise OSError("a file that was written, synced and renamed is not there")
    return seconds


def _existing(path: str) -> str:
    """The folder, or the nearest one above it that is there."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path
