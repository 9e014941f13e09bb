"""Runs `hanayo schedule`: show, compare, check and export schedules. No subcommand imports torch."""

from lightning_hanayo.cli.schedule.options import Options
from lightning_hanayo.cli.subcommands import CommandGroup

SUBCOMMANDS = {
    "show": "draw one schedule: in the terminal, or as an image, HTML page or trace",
    "compare": "compare all schedules for the same sizes and costs, the fastest first",
    "check": "check whether a CSV table is a valid schedule",
    "export": "write a schedule as the CSV table that torch.distributed.pipelining reads",
}
_GROUP = CommandGroup(
    "schedule",
    "Draw, compare, check and write pipeline schedules.",
    SUBCOMMANDS,
    "show hanayo --ranks 4 --microbatches 8 --waves 2 --output wave.html",
)


def run(argv: list[str]) -> int:
    """Run the subcommand that `argv` names, and return the exit code."""
    return _GROUP.run(argv, Options())
