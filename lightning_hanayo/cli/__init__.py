"""The command line: `hanayo <command> ...`, a file per command, imported when the command is given.

A command's module has one function, `run(argv) -> exit code`, whose `argv` starts with the command's own name.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from lightning_hanayo.cli.failure import debugging, fail
from lightning_hanayo.errors import HanayoError, nearest

_TRAINER = "lightning_hanayo.cli.trainer"

COMMANDS = {
    "fit": (_TRAINER, "train a model, from a configuration"),
    "validate": (_TRAINER, "measure a model on its validation data"),
    "test": (_TRAINER, "measure a model on its test data"),
    "predict": (_TRAINER, "let a model predict"),
    "schedule": ("lightning_hanayo.cli.schedule", "show, compare, check and export schedules"),
}


def run(argv: Sequence[str]) -> int:
    """Play one command line, without the program's name, and return the exit code: 2 for what the user can mend."""
    first = argv[0] if argv else ""
    if first in ("-h", "--help"):
        print(usage())
        return 0
    if first == "--version":
        print(f"hanayo {version('lightning-hanayo')}")
        return 0
    if first not in COMMANDS:
        wrong = f"unknown command {first!r}; {nearest(first, COMMANDS)}" if first else "a command is missing"
        return fail(f"{wrong}. See: hanayo --help")
    module, _ = COMMANDS[first]
    try:
        return int(import_module(module).run(list(argv)))
    except HanayoError as error:
        if debugging():
            raise
        return fail(str(error), first=error.first_of_all)


def usage() -> str:
    """What `hanayo --help` shows."""
    commands = "\n".join(f"  {name:<10}{meaning}" for name, (_, meaning) in COMMANDS.items())
    return (
        "usage: hanayo <command> [options]\n\n"
        'Wave pipelines for PyTorch Lightning: Trainer(strategy="hanayo") from the command line.\n\n'
        f"commands:\n{commands}\n\n"
        "options:\n  -h, --help  show this\n  --version   show the installed version\n\n"
        "With HANAYO_DEBUG=1 in the environment an error shows its traceback.\n"
        "A command's own options: hanayo <command> --help\n"
        "Example: hanayo fit --config recipes/gpt/wave.yaml"
    )
