"""Read every byte of checkpoints, and compare them with the hashes that were saved.

Of a checkpoint folder the file and the tensor of a changed byte are named. A plain file of Lightning has a checksum for
each of its parts. Nothing is unpickled.

Exit codes: 0 all whole, 1 one isn't, 2 if there is no such path.
"""

import json
import sys
import zipfile
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from lightning_hanayo.checkpoint.format.storage import Storage
from lightning_hanayo.checkpoint.found import Found, look_at_one
from lightning_hanayo.checkpoint.load.folder import CheckpointFolder
from lightning_hanayo.checkpoint.save.problems import size_text
from lightning_hanayo.cli.error_messages import fail
from lightning_hanayo.errors import CheckpointError

_CHUNK = 2**20
_LARGE = 2**30
"""bytes from which on a terminal shows progress"""


def add_options(parser: ArgumentParser) -> None:
    """Add the checkpoints."""
    meaning = "checkpoint folders or plain files"
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=meaning)


def run(options: Namespace) -> int:
    """Verify each, and go on after one that isn't whole."""
    found = {path: look_at_one(path) for path in options.checkpoints}
    problems = {path: _problem(path, one, quiet=options.json) for path, one in found.items()}
    if options.json:
        results = [{"path": path, "whole": not problem, "problem": problem} for path, problem in problems.items()]
        print(json.dumps(results))
    return int(any(problems.values()))


def _problem(path: str, found: Found | None, *, quiet: bool) -> str:
    """What is wrong with a checkpoint; "" if nothing. Prints it, too."""
    try:
        if found is not None and found.kind == "file":
            _verify_file(path)
        elif found is not None and Storage.of(path).is_file():
            raise CheckpointError(f"{path} isn't whole: {found.problem}")
        else:
            folder = CheckpointFolder(path)
            folder.verify(advance=_progress(folder.manifest.num_bytes))
    except CheckpointError as error:
        if not quiet:
            fail(str(error))
        return str(error)
    if not quiet:
        print(f"{path}: whole, {size_text(found.num_bytes if found else 0)}")
    return ""


def _verify_file(path: str) -> None:
    name = ""
    try:
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                name = f": {record.filename}"
                with archive.open(record) as data:
                    while data.read(_CHUNK):
                        pass
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, zlib.error) as error:
        raise CheckpointError(f"{path} is damaged{name} ({error}). Copy it again.") from None


def _progress(num_bytes: int) -> Callable[[int], None]:
    """Returns what is to be called after each piece; in a terminal it draws a bar if there is much to read."""
    if num_bytes < _LARGE or not sys.stderr.isatty():
        return lambda _: None
    from rich.console import Console
    from rich.progress import Progress

    progress = Progress(console=Console(stderr=True), transient=True)
    task = progress.add_task("verifying", total=num_bytes)
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress.start()
        progress.update(task, completed=done)
        if done >= num_bytes:
            progress.stop()

    return advance
