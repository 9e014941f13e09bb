"""Checks values of JSON documents that nobody has to believe."""

import re
from typing import Any


class ImpossibleError(ValueError):
    """A document says what can't be true; the message says what."""


def require(condition: bool, problem: str) -> None:
    """Raise an ImpossibleError unless the condition holds."""
    if not condition:
        raise ImpossibleError(problem)


def typed(value: Any, kind: type, what: str) -> Any:
    """Returns the value, which must be of just this type."""
    if type(value) is not kind:
        raise ImpossibleError(f"{what} is {_short(value)} instead of a {kind.__name__}")
    return value


def count(value: Any, what: str) -> int:
    """Returns the value, which must be a number from 0 on that fits into 64 bits."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ImpossibleError(f"{what} is {_short(value)}")
    return value


def matching(value: Any, pattern: re.Pattern[str], what: str) -> str:
    """Returns the value, which must be a text that matches the whole pattern."""
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise ImpossibleError(f"{what} is {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."
