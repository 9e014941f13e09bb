"""Says why a rank can't write a checkpoint, in one line that all ranks show."""

import errno
import os

from lightning_hanayo.errors import HanayoError

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
        sizes = "" if not needed else f": {readable(needed)} are needed"
        sizes += "" if free is None or not sizes else f", {readable(free)} were free"
        return f"no space left in {path}{sizes}"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return f"{str(error.filename or path).rstrip('/')} is a file, and no folder"
    return f"{error.filename or path} can't be written: {error.strerror or f'{type(error).__name__}: {error}'}"


def readable(num_bytes: int) -> str:
    """Returns a number of bytes in a unit that makes it short.

    Example:
        >>> readable(2_100_000_000)
        '2.10 GB'
    """
    size, units = float(num_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{num_bytes} bytes" if size == num_bytes else f"{size:.2f} {units[0]}"
