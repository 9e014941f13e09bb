"""Runs a command that has subcommands, such as `hanayo schedule show`. Each is a module, imported only if it is given.

A subcommand's module has `add_options(parser)` and `run(options) -> exit code`. Its docstring is the text of --help.
"""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from keyword import iskeyword

from lightning_hanayo.cli.error_messages import OneLineErrors, fail
from lightning_hanayo.errors import nearest


class SubcommandParser(OneLineErrors, ArgumentParser):
    """Parses a subcommand's options, without abbreviations. It is argparse's own parser, which imports quickly."""

    def __init__(self, prog: str, description: str | None) -> None:
        layout = RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=layout)


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
            hint = nearest(subcommand, self.subcommands)
            problem = (
                f"unknown subcommand {subcommand!r}; {hint}"
                if subcommand
                else f"a subcommand is missing: {', '.join(self.subcommands)}"
            )
            return fail(f"{problem}. See: hanayo {self.name} --help")
        module = import_module(f"lightning_hanayo.cli.{self.name}.{subcommand}{'_' * iskeyword(subcommand)}")
        parser = SubcommandParser(f"hanayo {self.name} {subcommand}", module.__doc__)
        module.add_options(parser)
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
        try:
            code = int(module.run(parser.parse_args(argv[2:], options)))
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
