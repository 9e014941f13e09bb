"""The errors this package raises: a user's mistake is a `HanayoError`, always a `ValueError`."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeVar

_T = TypeVar("_T")


class HanayoError(ValueError):
    """A mistake the user can mend. Its message says what, where, expected, got, and what to try."""

    first_of_all = False
    """whether this rank failed with it before all others, so that it is the one to show it"""
    cell: tuple[int, int] | None = None
    """the rank and the place in its row, where it is about an action of a schedule's table"""


class UnsupportedError(HanayoError):
    """Something a pipeline can't play (manual optimization, a second pass through the stack, ...), refused by name."""


class PeerFailed(SystemExit):
    """Another rank failed first and has shown why; this rank ends quietly, with the other's exit code."""

    def __init__(self, cause: str, code: int = 1) -> None:
        super().__init__(code)
        self.cause = cause

    def __str__(self) -> str:
        return self.cause


class NotAvailableError(RuntimeError):
    """Something was asked for before it exists. The message says from when on it does."""


def available(value: _T | None, condition: str) -> _T:
    """Return `value`, which isn't None once the condition holds.

    Raises:
        NotAvailableError: it is None; the message is the condition.

    Example:
        >>> available(None, "the pipeline exists while the Trainer runs")
        Traceback (most recent call last):
        lightning_hanayo.errors.NotAvailableError: the pipeline exists while the Trainer runs
    """
    if value is None:
        raise NotAvailableError(condition)
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt `name`: the nearest of `known` first, then all of them.

    Example:
        >>> nearest("hanyo", ["gpipe", "hanayo"])
        "did you mean 'hanayo'? Known: gpipe, hanayo"
    """
    choices = list(known)
    close = get_close_matches(name, choices, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(choices)}"
