"""Readable: what argparse, or jsonargparse, says about a mistake, in one line in place of usage and nested reports."""

import re
import traceback
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import chain
from typing import Any, NoReturn

from lightning_hanayo.cli.failure import debugging, fail

_UNKNOWN = re.compile(
    r"(?:Subcommand '(?P<command>\w+)' does not accept option|Option|unrecognized arguments:) '?(?P<option>[^\s'=]+)",
    re.IGNORECASE,
)
_KEY = re.compile(r'Parser key "(?P<key>[^"]+)":')
_EXPECTED = re.compile(r"Expected an? (?P<kind>.+?)(?:\. Got value.*)?$", re.MULTILINE)
_GIVEN = re.compile(r"(?:Given value|Got value): (?P<value>.*)")
_ITEM = re.compile(r"^ *- (?P<item>.+\n(?: {4,}(?! |- ).+\n)*)", re.MULTILINE)
_REQUIRED = re.compile(r"the following arguments are required: (?P<names>.+)")
_MANY = 16


class Readable:
    """Makes a parser (the next class in line) say one thing, without usage, tips and nested reports."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Show one line, and end with exit code 2."""
        if debugging() and ex is not None:
            traceback.print_exception(ex)
        raise SystemExit(fail(self._readable(message)))

    def _readable(self, message: str) -> str:
        required = _REQUIRED.search(message)
        if required is not None:
            return f"missing: {required['names']}"
        unknown = _UNKNOWN.search(message)
        if unknown is None:
            return condense(message)
        if message.startswith("unrecognized") and not unknown["option"].startswith("-"):
            return f"unexpected: {unknown['option']!r}"
        option = unknown["option"].lstrip("-")
        parsers = [parser for name, parser in self._commands() if unknown["command"] in (None, name)] or [self]
        return f"unknown option {option!r}; {hint(option, dict.fromkeys(chain(*map(_options, parsers))))}"

    def _commands(self) -> list[tuple[str, Any]]:
        """The parsers of the subcommands, if this is the outermost parser and not one of a class's own options."""
        action = getattr(self, "_subcommands_action", None)
        return list(action.choices.items()) if action is not None else []


def _options(parser: Any) -> Iterator[str]:
    """The options that `parser` knows, without their dashes: dotted, as a configuration writes them."""
    for action in parser._actions:
        if not action.option_strings:
            continue
        name = action.option_strings[-1].lstrip("-")
        if name not in ("help", "config", "print_config") and not name.endswith(".help"):
            yield name


def hint(name: str, known: Iterable[str]) -> str:
    """The nearest of `known` to the misspelt `name`; all of them where they are few, those beside it where not.

    Example:
        >>> hint("num_wave", ["num_waves", "blocks"])
        "did you mean 'num_waves'? Known: num_waves, blocks"
    """
    choices = list(known)
    group = name.rpartition(".")[0]
    beside = [choice for choice in choices if choice.rpartition(".")[0] == group] or choices
    close = get_close_matches(name, beside, n=1) or get_close_matches(name, choices, n=1)
    parts = [f"did you mean {close[0]!r}?"] if close else []
    if len(beside) <= _MANY:
        parts.append(f"Known: {', '.join(beside)}")
    elif not close:
        parts.append(f"Known are {len(beside)} others; --help shows them")
    return " ".join(parts)


def condense(message: str) -> str:
    """One line out of jsonargparse's report on a value of the wrong kind.

    Example:
        >>> condense('Parser key "num_waves":\\n  Expected a <class \\'int\\'>. Got value: two')
        'num_waves: expected int, got two'
    """
    key = _KEY.search(message)
    prefix = f"{key['key']}: " if key else ""
    report = message[key.end() if key else 0 :]
    items = [re.sub(r"\s*\n\s*", " ", item).strip() for item in _ITEM.findall(report + "\n")]
    reasons = [item for item in items if not item.startswith(("Expected", "Does not validate"))]
    if reasons:
        return prefix + "; ".join(reasons)
    kinds, given = _EXPECTED.findall(report), _GIVEN.search(report)
    if kinds and given:
        return f"{prefix}expected {' or '.join(dict.fromkeys(map(_plain, kinds)))}, got {given['value']}"
    return prefix + report.strip()


def _plain(kind: str) -> str:
    """A type as a reader writes it: `<class 'int'>` is `int`, `typing.Literal['auto']` is `'auto'`."""
    kind = re.sub(r"^<class '(.+)'>$", r"\1", kind)
    return re.sub(r"^typing\.Literal\[(.+)\]$", r"\1", kind)
