"""Shows a user's mistake as one line, on one rank: shortens what argparse and jsonargparse report, and exits with 2.

Runs a command that has subcommands, such as `hanayo schedule show`. Each is a module, imported only if it is given.

A subcommand's module has `add_options(parser)` and `run(options) -> exit code`. Its docstring is the text of --help.

Prints tables: in colours in a terminal, as plain text in a pipe.
"""

import os
import re
import sys
import traceback
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import getdoc
from itertools import chain
from keyword import iskeyword
from typing import Any, NoReturn

from lightning_hanayo.errors import is_debugging, is_rank_zero, nearest

EXIT_CODE = 2
OTHERS = "All other options are those of hanayo fit (hanayo fit --help), such as --config and --model.width=64."
"""the end of --help of commands that read the configuration of a training"""

_UNKNOWN = re.compile(
    r"(?:Subcommand '(?P<command>\w+)' does not accept option|Option|unrecognized arguments:) '?(?P<option>[^\s'=]+)",
    re.IGNORECASE,
)
_KEY = re.compile(r'Parser key "(?P<key>[^"]+)":')
_EXPECTED = re.compile(r"Expected an? (?P<type>.+?)(?:\. Got value.*)?$", re.MULTILINE)
_GIVEN = re.compile(r"(?:Given value|Got value): (?P<value>.*)")
_ITEM = re.compile(r"^ *- (?P<item>.+\n(?: {4,}(?! |- ).+\n)*)", re.MULTILINE)
_REQUIRED = re.compile(r"the following arguments are required: (?P<names>.+)")
_MAX_LISTED = 16
"""options that an error message lists"""


def fail(message: str, *, failed_first: bool = False) -> int:
    """Print `message` to stderr, on one rank only, and return the exit code.

    Args:
        message: one line.
        failed_first: whether this rank failed before all others, and so must print. Otherwise all ranks found the same
            mistake before the launch, and global rank 0 prints.
    """
    if failed_first or is_rank_zero(os.environ):
        print(f"hanayo: error: {message}", file=sys.stderr, flush=True)
    return EXIT_CODE


class OneLineErrors:
    """Mixin for a parser (the next base class): errors are one line, without usage, tips and nested reports."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one line, and end with exit code 2."""
        if is_debugging() and ex is not None:
            traceback.print_exception(ex)
        raise SystemExit(fail(self._one_line(message)))

    def _one_line(self, message: str) -> str:
        required = _REQUIRED.search(message)
        if required is not None:
            return f"missing: {required['names']}"
        unknown = _UNKNOWN.search(message)
        if unknown is None:
            return condense(message)
        if message.startswith("unrecognized") and not unknown["option"].startswith("-"):
            return f"unexpected: {unknown['option']!r}"
        option = unknown["option"].lstrip("-")
        action = getattr(self, "_subcommands_action", None)  # only jsonargparse's outermost parser has subcommands
        subcommands = action.choices if action is not None else {}
        parsers = [parser for name, parser in subcommands.items() if unknown["command"] in (None, name)] or [self]
        known = dict.fromkeys(chain(*map(_options, parsers)))
        option = _first_unknown(option, known)
        return f"unknown option {option!r}; {hint(option, known)}"


def _options(parser: Any) -> list[str]:
    """The options of `parser`, dotted and without dashes, as a configuration file writes them."""
    names = [action.option_strings[-1].strip("-+") for action in parser._actions if action.option_strings]
    return [name for name in names if name not in ("help", "config", "print_config") and not name.endswith(".help")]


def _first_unknown(name: str, known: Iterable[str]) -> str:
    """A misspelt option up to the first part that is unknown: `trainer.stratgy` of `trainer.stratgy.class_path`."""
    parts = name.split(".")
    for beginning in (".".join(parts[:count]) for count in range(1, len(parts))):
        if not any(option.startswith(f"{beginning}.") for option in known):
            return name if beginning in known else beginning  # the options of a class are those that it has
    return name


def hint(name: str, known: Iterable[str]) -> str:
    """The most similar of the `known` options to a misspelt one, and those of its group if they are few.

    Example:
        >>> hint("num_wave", ["num_waves", "blocks"])
        "did you mean 'num_waves'? Known: num_waves, blocks"
    """
    choices = list(known)
    if not choices:
        return "there is no class that could have it; class_path names one"
    prefix = name.rpartition(".")[0]
    group = [choice for choice in choices if choice.rpartition(".")[0] == prefix] or choices
    if len(group) <= _MAX_LISTED:
        return nearest(name, group)
    close = get_close_matches(name, group, n=1) or get_close_matches(name, choices, n=1)
    return f"did you mean {close[0]!r}?" if close else f"There are {len(group)} options; --help lists them"


def condense(message: str) -> str:
    """One line from jsonargparse's report of a value of the wrong type.

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
    types, given = _EXPECTED.findall(report), _GIVEN.search(report)
    if types and given:
        return f"{prefix}expected {' or '.join(dict.fromkeys(map(_short_type, types)))}, got {given['value']}"
    return prefix + report.strip()


def _short_type(name: str) -> str:
    """`<class 'int'>` becomes `int`, `typing.Literal['auto']` becomes `'auto'`."""
    name = re.sub(r"^<class '(.+)'>$", r"\1", name)
    return re.sub(r"^typing\.Literal\[(.+)\]$", r"\1", name)


class CommandParser(OneLineErrors, ArgumentParser):
    """Parses a command's options, without abbreviations. It is argparse's own parser, which imports quickly."""

    def __init__(self, prog: str, description: str | None, *, usage: str | None = None, **options: Any) -> None:
        layout = RawDescriptionHelpFormatter
        super().__init__(prog, usage, description, allow_abbrev=False, formatter_class=layout, **options)


def number(
    is_valid: Callable[[float], bool], expected: str, kind: Callable[[str], Any] = float
) -> Callable[[str], Any]:
    """The type of options that are a number."""

    def convert(text: str) -> Any:
        with suppress(ValueError):
            if is_valid(value := kind(text)):
                return value
        raise ArgumentTypeError(f"expected {expected}, got {text!r}")

    return convert


whole_number = number(lambda value: value >= 1, "a whole number of at least 1", int)
"""the type of options that count something"""


def quantity(text: str, units: Mapping[str, float], expected: str) -> float:
    """The type of options that are a number above 0 and one of these units, in upper case.

    Example:
        >>> quantity("1.5 kB", {"KB": 1e3}, "a size such as 5kB")
        1500.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(\S*)", text.strip())
    if found is None or found[2].upper() not in units or not float(found[1]):
        raise ArgumentTypeError(f"expected {expected}, got {text!r}")
    return float(found[1]) * units[found[2].upper()]


@dataclass(frozen=True)
class CommandGroup:
    """A command and its subcommands, which are modules of `lightning_hanayo.cli.<name>`.

    Args:
        name: such as "schedule".
        summary: what the subcommands do, in one sentence.
        subcommands: the meaning of each, by name.
        example: arguments of one call.
    """

    name: str
    summary: str
    subcommands: Mapping[str, str]
    example: str

    def run(self, argv: Sequence[str], options: Namespace) -> int:
        """Run the subcommand that `argv` names, and return the exit code. Its options are added to `options`."""
        subcommand = argv[1] if len(argv) > 1 else ""
        if subcommand in ("-h", "--help"):
            print(self.usage())
            return 0
        if subcommand not in self.subcommands:
            problem = f"unknown subcommand {subcommand!r}; {nearest(subcommand, self.subcommands)}"
            if not subcommand:
                problem = f"a subcommand is missing: {', '.join(self.subcommands)}"
            return fail(f"{problem}. See: hanayo {self.name} --help")
        module = import_module(f"lightning_hanayo.cli.{self.name}")
        function = f"{subcommand}{'_' * iskeyword(subcommand)}"
        run = getattr(module, f"run_{function}")
        parser = CommandParser(f"hanayo {self.name} {subcommand}", getdoc(run))
        getattr(module, f"{function}_options")(parser)
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
        try:
            code = int(run(parser.parse_args(argv[2:], options)))
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # the reader of the output has closed the pipe, such as `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    def usage(self) -> str:
        """The text of `hanayo <name> --help`."""
        subcommands = "\n".join(f"  {name:<10}{meaning}" for name, meaning in self.subcommands.items())
        return (
            f"usage: hanayo {self.name} <subcommand> [options]\n\n"
            f"{self.summary}\n\nsubcommands:\n{subcommands}\n\n"
            f"For the options of a subcommand: hanayo {self.name} <subcommand> --help\n"
            f"Example: hanayo {self.name} {self.example}"
        )


_PIPE_COLUMNS = 10_000
"""characters per line of a table in a pipe: more than any needs"""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], is_dim: Sequence[bool] | None = None) -> None:
    """Print a table. The first column is left-aligned, the others right-aligned; `is_dim` says which rows are grey.

    In a narrow terminal a cell takes several lines, and in a pipe lines are as long as needed: nothing is cut.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row, dim in zip(rows, is_dim or [False] * len(rows), strict=True):
        table.add_row(*row, style="dim" if dim else None)
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    Console(highlight=False, markup=False, emoji=False, width=width).print(table)
