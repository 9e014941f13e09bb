"""Runs `hanayo schedule`: show, compare, check and export schedules. Each subcommand is a module; none imports torch.

A subcommand's module has `add_options(parser)` and `run(options) -> exit code`. Its docstring is the text of --help.
"""

import os
import sys
from importlib import import_module

from lightning_hanayo.cli.error_messages import fail
from lightning_hanayo.cli.schedule.options import Options, ScheduleParser
from lightning_hanayo.errors import nearest

SUBCOMMANDS = {
    "show": "draw one schedule: in the terminal, or as an image, HTML page or trace",
    "compare": "compare all schedules for the same sizes and costs, the fastest first",
    "check": "check whether a CSV table is a valid schedule",
    "export": "write a schedule as the CSV table that torch.distributed.pipelining reads",
}


def run(argv: list[str]) -> int:
    """Run the subcommand that `argv` names, and return the exit code."""
    subcommand = argv[1] if len(argv) > 1 else ""
    if subcommand in ("-h", "--help"):
        print(usage())
        return 0
    if subcommand not in SUBCOMMANDS:
        hint = nearest(subcommand, SUBCOMMANDS)
        problem = f"unknown subcommand {subcommand!r}; {hint}" if subcommand else "a subcommand is missing"
        return fail(f"{problem}. See: hanayo schedule --help")
    module = import_module(f"lightning_hanayo.cli.schedule.{subcommand}")
    parser = ScheduleParser(f"hanayo schedule {subcommand}", module.__doc__)
    module.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    try:
        code = int(module.run(parser.parse_args(argv[2:], Options())))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output has closed the pipe, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def usage() -> str:
    """The text of `hanayo schedule --help`."""
    subcommands = "\n".join(f"  {name:<10}{meaning}" for name, meaning in SUBCOMMANDS.items())
    return (
        "usage: hanayo schedule <subcommand> [options]\n\n"
        f"Draw, compare, check and write pipeline schedules.\n\nsubcommands:\n{subcommands}\n\n"
        "For the options of a subcommand: hanayo schedule <subcommand> --help\n"
        "Example: hanayo schedule show hanayo --ranks 4 --microbatches 8 --waves 2 --output wave.html"
    )
