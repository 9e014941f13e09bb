"""Reads the small files that people give: an error names a wrong one, and says what was expected."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path

from lightning_hanayo.errors import HanayoError


def read_text(path: str | PathLike[str], max_bytes: int) -> str:
    """The file's text; raises `HanayoError` if it is longer, and what reading raises."""
    if Path(path).stat().st_size > max_bytes:
        raise HanayoError(f"it has more than {max_bytes >> 20} MiB")
    return Path(path).read_text(encoding="utf-8")


@contextmanager
def refusing(path: str | PathLike[str], kind: str, expected: str) -> Iterator[None]:
    """Inside it the file is read and understood; what fails becomes one error.

    Args:
        path: the file, or what the user called it.
        kind: what it is no such thing of, as "profile".
        expected: what was.

    Raises:
        HanayoError: the file can't be read, or is something else.
    """
    try:
        yield
    except OSError as error:
        raise HanayoError(f"{fspath(path)} can't be read: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        reason = "it is no text" if isinstance(error, UnicodeDecodeError) else repr(error)
        reason = str(error) if isinstance(error, HanayoError) else reason
        raise HanayoError(f"{fspath(path)} is no {kind}: {reason}; expected {expected}") from None
