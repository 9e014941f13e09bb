"""Writes and reads sizes in bytes, as people do."""

import re
from argparse import ArgumentTypeError

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def size_text(num_bytes: int) -> str:
    """A size in the largest unit that it has one of.

    Example:
        >>> size_text(1_500_000)
        '1.5 MB'
    """
    unit = max((unit for unit, size in _UNITS.items() if size <= num_bytes), key=_UNITS.__getitem__, default="B")
    return f"{num_bytes / _UNITS[unit]:.{1 if unit != 'B' else 0}f} {unit}"


def size(text: str) -> int:
    """The bytes of a size such as "5GB" or "500 MB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?B)", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ArgumentTypeError(f"expected a size such as 5GB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])
