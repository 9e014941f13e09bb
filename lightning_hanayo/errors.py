"""Defines the errors of this package: a user's mistake is a `HanayoError`, which is always a `ValueError`."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from os import PathLike
from typing import TypeVar

_T = TypeVar("_T")


class HanayoError(ValueError):
    """A mistake that the user can fix. Its message says what, where, expected, got, and what to try."""

    failed_first = False
    """whether this rank failed before all others, so that it is the one that shows the error"""
    is_common = False
    """whether all ranks raise it at the same place, so that none waits for this one"""
    cell: tuple[int, int] | None = None
    """the rank and the position in its row, if the error is about an action of a schedule's table"""


class UnsupportedError(HanayoError):
    """The model or the options use a feature that a pipeline doesn't support, such as manual optimization."""


ONE_PACKAGE = "put `import lightning_hanayo.pytorch_lightning` above all other imports: it makes them one package."
"""how classes of `pytorch_lightning` become those of `lightning.pytorch`, for messages"""


class OtherPackageError(HanayoError):
    """A Trainer of `pytorch_lightning` was given the strategy, by name or as an object."""

    def __init__(self) -> None:
        advice = f"Import all from `lightning.pytorch`. If a library imports `pytorch_lightning`, {ONE_PACKAGE}"
        super().__init__(
            f"HanayoStrategy is of `lightning.pytorch`; this Trainer comes from `pytorch_lightning`. {advice}"
        )


class CheckpointError(HanayoError):
    """A checkpoint that is not whole, was changed, or can't be written or read. The message names the file."""


class NonFiniteError(FloatingPointError):
    """Gradients are NaN or infinite. The message says where the first one was made; the weights were not changed."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path. It is a `FileNotFoundError`, too, which Lightning raises."""


class ReplicasDifferError(RuntimeError):
    """Ranks that hold the same parameter have different values of it. The message names it and the ranks."""


class PeerFailed(SystemExit, Exception):
    """Another rank failed first and has shown the cause; this rank exits quietly with the same exit code.

    It is an `Exception`, too: a script that catches the error of a run goes on with all ranks.
    """

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


def with_notes(error: BaseException) -> str:
    """The error's message, and the notes that were added to it.

    Example:
        >>> error = ValueError("no such shape")
        >>> error.add_note("This was on micro-batch 0.")
        >>> with_notes(error)
        'no such shape. This was on micro-batch 0.'
    """
    text = str(error)
    for note in getattr(error, "__notes__", ()):
        text = f"{text.rstrip('.!')}. {note}"
    return text


def is_debugging() -> bool:
    """Whether `HANAYO_DEBUG` is set, so that errors are shown with their traceback."""
    return bool(os.environ.get("HANAYO_DEBUG"))


def is_rank_zero(environment: Mapping[str, str]) -> bool:
    """Whether this process is global rank 0, by the variables that torchrun, SLURM or Lightning's launcher set.

    Example:
        >>> is_rank_zero({}), is_rank_zero({"NODE_RANK": "1", "LOCAL_RANK": "0"})
        (True, False)
    """
    for variable in ("RANK", "SLURM_PROCID"):
        if variable in environment:
            return environment[variable] == "0"
    return all(environment.get(name, "0") == "0" for name in ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK"))


@contextmanager
def writing(path: str | PathLike[str]) -> Iterator[None]:
    """Inside it, a file that can't be written is a HanayoError that names the file and the reason."""
    try:
        yield
    except OSError as error:
        raise HanayoError(f"{path} can't be written: {error.strerror or error}") from None


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first names, and how many there are besides.

    Example:
        >>> listed(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def counted(number: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "sample"), counted(4, "micro-batch")
        ('1 sample', '4 micro-batches')
    """
    return f"{number} {noun}" + (("es" if noun.endswith(("ch", "ss")) else "s") if number != 1 else "")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt `name`: the most similar of the `known` names, then all of them.

    Example:
        >>> nearest("hanyo", ["gpipe", "hanayo"])
        "did you mean 'hanayo'? Known: gpipe, hanayo"
    """
    choices = list(known)
    close = get_close_matches(name, choices, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(choices)}"
