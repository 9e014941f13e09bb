"""A small file that says which checkpoints a run has saved, so that its next start finds them.

<default_root_dir>/.hanayo/torchrun-job17.json
{"started": 1763800000.0, "starters": ["..."], "saved": {"0": ["/runs/version_0/checkpoints/last.ckpt"]}}

A restart gets other folders from its loggers (version_1), and a folder may hold checkpoints of other runs.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_hanayo.checkpoint.format.storage import Storage
from lightning_hanayo.checkpoint.found import Found, look_at
from lightning_hanayo.checkpoint.save.plain_file import write_file

FOLDER = ".hanayo"


@dataclass
class Record:
    """What a run remembers from start to start."""

    started: float
    """when the run started for the first time, in seconds since 1970"""
    starters: list[str]
    """who has started it so far"""
    saved: dict[str, list[str]] = field(default_factory=dict)
    """where each `fit` of the script has saved a checkpoint, by its number"""

    @staticmethod
    def read(path: str) -> "Record | None":
        """What the file holds; None without one, or if it isn't whole."""
        folder, _, name = path.rpartition("/")
        try:
            return Record(**json.loads(bytes(Storage.of(folder).read(name))))
        except (OSError, TypeError, ValueError):
            return None

    def write(self, path: str) -> None:
        """Replace the file at once. One rank calls it."""
        content = json.dumps(asdict(self)).encode()
        write_file(path, lambda file: file.write(content))

    def checkpoints_of(self, fit: int) -> tuple[list[Found], list[Found]]:
        """The whole checkpoints of one `fit`, the newest first; and those that aren't whole.

        A checkpoint that was there before the run has started isn't its own: the save to that path was interrupted.
        """
        found = [one for one in map(look_at, self.saved.get(str(fit), ())) if one is not None]
        own = [one for one in found if one.saved >= int(self.started)]
        whole = [one for one in own if one.kind in ("folder", "file")]
        broken = [one for one in found if one.kind in ("incomplete", "leftover")]
        return sorted(whole, key=lambda one: (one.step or 0, one.saved), reverse=True), broken


def record_path(root: str | os.PathLike[str], key: str) -> str:
    """Where the record of a run is: in the Trainer's default_root_dir."""
    return f"{os.fspath(root).rstrip('/')}/{FOLDER}/{key}.json"


def absolute(path: str | Path) -> str:
    """A local path from the root on; a URL as it is."""
    storage: Any = Storage.of(path)
    return os.path.abspath(storage.path) if storage.is_local else os.fspath(path)
