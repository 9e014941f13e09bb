"""Converts the values of command-line options to numbers, with a readable error."""

from argparse import ArgumentTypeError
from math import isfinite


def non_negative(text: str) -> float:
    """A finite number of at least 0.

    Raises:
        ArgumentTypeError: it isn't one.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not isfinite(value) or value < 0:
        raise ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value


def positive(text: str) -> float:
    """A finite number above 0.

    Raises:
        ArgumentTypeError: it isn't one.
    """
    if non_negative(text) == 0:
        raise ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return float(text)


def integer(text: str) -> int:
    """A whole number. Its range is checked where it is used.

    Raises:
        ArgumentTypeError: it isn't one.
    """
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def integer_or_auto(text: str) -> int | str:
    """A whole number, or "auto".

    Raises:
        ArgumentTypeError: it is neither.
    """
    return text if text == "auto" else integer(text)


def cost(text: str) -> float | tuple[float, ...]:
    """A number, or one per stage, separated by commas.

    Example:
        >>> cost("0.5"), cost("1,1,2,1")
        (0.5, (1.0, 1.0, 2.0, 1.0))

    Raises:
        ArgumentTypeError: it is neither.
    """
    values = tuple(map(non_negative, text.split(",")))
    return values if len(values) > 1 else values[0]
