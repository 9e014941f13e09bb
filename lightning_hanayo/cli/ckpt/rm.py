"""Remove checkpoints: folders, plain files, and what interrupted saves have left.

Asks before it removes anything, unless --yes is given. What isn't a checkpoint is refused, and other files in a
checkpoint's folder are kept.

Exit codes: 0, 1 if the answer was no or something was kept, 2 if a path isn't a checkpoint; then nothing is removed.
"""

import json
import shutil
import sys
import warnings
from argparse import ArgumentParser, Namespace

from lightning_hanayo.checkpoint.format.storage import Storage
from lightning_hanayo.checkpoint.found import Found, existing, look_at
from lightning_hanayo.checkpoint.save.leftovers import is_of_a_save
from lightning_hanayo.checkpoint.save.problems import size_text
from lightning_hanayo.checkpoint.save.removal import remove_checkpoint
from lightning_hanayo.cli.error_messages import fail
from lightning_hanayo.errors import HanayoError


def add_options(parser: ArgumentParser) -> None:
    """Add the checkpoints, and whether to ask."""
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="checkpoint folders or plain files")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(options: Namespace) -> int:
    """Look at all paths, ask, and remove what is at them."""
    found = [_removable(path) for path in dict.fromkeys(options.checkpoints)]
    if not options.yes and not _agreed(found):
        return 1
    kept = [problem for one in found for problem in _remove(one)]
    for problem in kept:
        fail(problem)
    if options.json:
        print(json.dumps({"removed": [one.path for one in found], "kept": kept}))
    elif not kept:
        print(f"removed {size_text(sum(one.num_bytes for one in found))}")
    return int(bool(kept))


def _removable(path: str) -> Found:
    found = look_at(existing(path))
    if found is None:
        raise HanayoError(f"{path} is no checkpoint, so it isn't removed")
    return found


def _agreed(found: list[Found]) -> bool:
    if not sys.stdin.isatty():
        raise HanayoError("there is no terminal to ask in: give --yes to remove without a question")
    for one in found:
        print(f"{one.path}  {one.kind}, {size_text(one.num_bytes)}, step {one.step}", file=sys.stderr)
    print(f"remove {'it' if len(found) == 1 else 'them'}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove(one: Found) -> list[str]:
    """Remove it, and return why something of it was kept."""
    storage = Storage.of(one.path)
    if one.kind == "leftover" and storage.is_folder() and all(map(is_of_a_save, storage.names())):
        shutil.rmtree(one.path)
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        remove_checkpoint(one.path)
    return [str(warning.message) for warning in caught]
