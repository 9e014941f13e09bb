"""The versions that are installed, compared with those that the package supports."""

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from lightning_hanayo.cli.doctor.finding import Finding

_TOPIC = "versions"
_LEAST = {"torch": (2, 10), "lightning": (2, 6, 6)}
_WITHDRAWN = {"lightning": ("2.6.2", "2.6.3")}
"""releases that contained malicious code"""
_OTHERS = ("lightning-hanayo", "xxhash", "safetensors", "jsonargparse", "torchmetrics", "transformers")


def installed(name: str) -> str | None:
    """The version of a package; None if it isn't installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def examine(
    find: Callable[[str], str | None] = installed, python: str = platform.python_version()
) -> Iterator[Finding]:
    """Look at Python and the packages; nothing of them is imported."""
    is_old = _numbers(python) < (3, 10)
    yield Finding(_TOPIC, "python", python).flagged_if(is_old, "problem", "install Python 3.10 or later")
    for name, least in _LEAST.items():
        yield _package(name, least, find(name))
    for name in _OTHERS:
        if (found := find(name)) is not None:
            yield Finding(_TOPIC, name, found)


def _package(name: str, least: tuple[int, ...], found: str | None) -> Finding:
    wanted = ".".join(map(str, least))
    advice = f"pip install '{name}>={wanted}'"
    if found is None:
        return Finding(_TOPIC, name, "not installed", "problem", advice)
    if found in _WITHDRAWN.get(name, ()):
        return Finding(_TOPIC, name, f"{found}, a release with malicious code", "problem", f"{advice}, change all keys")
    if _numbers(found) < least:
        return Finding(_TOPIC, name, f"{found}, older than {wanted}", "problem", advice)
    return Finding(_TOPIC, name, found)


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"; a release candidate counts as its release."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = "".join(c for c in part[: len(part) - len(part.lstrip("0123456789"))])
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
