"""Converts the values of command-line options to numbers. An ArgumentTypeError is shown to the user."""

from argparse import ArgumentTypeError
from math import isfinite


def non_negative(text: str) -> float:
    """A finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not isfinite(value) or value < 0:
        raise ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = non_negative(text)
    if value == 0:
        raise ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def integer(text: str) -> int:
    """A whole number. Its range is checked where it is used."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def integer_or_auto(text: str) -> int | str:
    """A whole number, or "auto"."""
    return text if text == "auto" else integer(text)


def cost(text: str) -> float | tuple[float, ...]:
    """A number, or one per stage, separated by commas: "0.5", "1,1,2,1"."""
    values = tuple(map(non_negative, text.split(",")))
    return values if len(values) > 1 else values[0]
