"""Says why a rank can't write a checkpoint, in one line that all ranks show; and sizes, as people write them."""

import errno
import os

from lightning_hanayo.errors import HanayoError

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FULL = (errno.ENOSPC, errno.EDQUOT)


def no_space(path: str) -> OSError:
    """Returns the error of a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def problem_of(error: Exception, path: str, needed: int | None = None, free: int | None = None) -> str:
    """Returns what is wrong, without a full stop.

    Args:
        error: what a step has raised.
        path: where it wrote, for errors that don't say it.
        needed: bytes to write.
        free: bytes that were free before.
    """
    if isinstance(error, HanayoError):
        return str(error).rstrip(".")
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    if error.errno in _FULL:
        sizes = "" if not needed else f": {size_text(needed)} are needed"
        sizes += "" if free is None or not sizes else f", {size_text(free)} were free"
        return f"no space left in {path}{sizes}"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return f"{str(error.filename or path).rstrip('/')} is a file, and no folder"
    return f"{error.filename or path} can't be written: {error.strerror or f'{type(error).__name__}: {error}'}"


def size_text(num_bytes: int) -> str:
    """A size in the largest unit that it has one of.

    Example:
        >>> size_text(1_500_000)
        '1.5 MB'
    """
    unit = max((unit for unit, size in UNITS.items() if size <= num_bytes), key=UNITS.__getitem__, default="B")
    return f"{num_bytes / UNITS[unit]:.{1 if unit != 'B' else 0}f} {unit}"
