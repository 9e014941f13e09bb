"""The command `hanayo schedule`: show, compare, check and export schedules. A file per subcommand; loads no torch.

A subcommand's module has `add_options(parser)` and `run(options) -> exit code`; its docstring is its help.
"""

import os
import sys
from importlib import import_module

from lightning_hanayo.cli.failure import fail
from lightning_hanayo.cli.schedule.options import Options, Parser
from lightning_hanayo.errors import nearest

SUBCOMMANDS = {
    "show": "draw one schedule: terminal, PNG, SVG, HTML page or trace",
    "compare": "all schedules for the same sizes and costs, the fastest first",
    "check": "is a CSV table a schedule?",
    "export": "write a schedule as the CSV table that torch.distributed.pipelining reads",
}


def run(argv: list[str]) -> int:
    """Play one command line."""
    first = argv[1] if len(argv) > 1 else ""
    if first in ("-h", "--help"):
        print(usage())
        return 0
    if first not in SUBCOMMANDS:
        wrong = f"unknown subcommand {first!r}; {nearest(first, SUBCOMMANDS)}" if first else "a subcommand is missing"
        return fail(f"{wrong}. See: hanayo schedule --help")
    module = import_module(f"lightning_hanayo.cli.schedule.{first}")
    parser = Parser(f"hanayo schedule {first}", module.__doc__)
    module.add_options(parser)
    try:
        code = int(module.run(Options(parser.parse_args(argv[2:]))))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has seen enough, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def usage() -> str:
    """What `hanayo schedule --help` shows."""
    subcommands = "\n".join(f"  {name:<10}{meaning}" for name, meaning in SUBCOMMANDS.items())
    return (
        "usage: hanayo schedule <subcommand> [options]\n\n"
        f"Pipeline schedules: draw, compare, check and write them.\n\nsubcommands:\n{subcommands}\n\n"
        "A subcommand's own options: hanayo schedule <subcommand> --help\n"
        "Example: hanayo schedule show hanayo --ranks 4 --microbatches 8 --waves 2 --output wave.html"
    )
