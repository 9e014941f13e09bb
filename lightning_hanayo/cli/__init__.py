"""Runs the command line `hanayo <command> ...`. Each command is a module, imported only if the command is given.

A command's module has a function `run(argv) -> exit code`, whose `argv` starts with the name of the command.
"""

from collections.abc import Sequence
from importlib import import_module

from lightning_hanayo import __version__
from lightning_hanayo.cli.common import fail
from lightning_hanayo.errors import HanayoError, is_debugging, nearest, with_notes

_TRAINER = "lightning_hanayo.cli.trainer_start"

COMMANDS = {
    "init": ("lightning_hanayo.cli.init", "copy a recipe into a new folder, to run and to change"),
    "fit": (_TRAINER, "train a model from a configuration"),
    "validate": (_TRAINER, "evaluate a model on its validation data"),
    "test": (_TRAINER, "evaluate a model on its test data"),
    "predict": (_TRAINER, "compute a model's predictions"),
    "check": ("lightning_hanayo.cli.check", "check that the training is the same as in one process"),
    "plan": ("lightning_hanayo.cli.plan", "find the fastest layout of a model on so many devices"),
    "doctor": ("lightning_hanayo.cli.doctor", "look at versions, devices, network, disk and links between ranks"),
    "schedule": ("lightning_hanayo.cli.schedule", "show, compare, check and export pipeline schedules"),
    "ckpt": ("lightning_hanayo.cli.ckpt", "list, check, compare, convert and remove checkpoints"),
}


def run(argv: Sequence[str]) -> int:
    """Run the command line (without the program's name) and return its exit code: 2 for a user's mistake."""
    command = argv[0] if argv else ""
    if command in ("-h", "--help"):
        print(usage())
        return 0
    if command == "--version":
        print(f"hanayo {__version__}")
        return 0
    if command not in COMMANDS:
        problem = f"unknown command {command!r}; {nearest(command, COMMANDS)}"
        if not command:
            problem = "a command is missing; to start from an example: hanayo init my-gpt"
        return fail(f"{problem}. See: hanayo --help")
    module, _ = COMMANDS[command]
    try:
        return int(import_module(module).run(list(argv)))
    except HanayoError as error:
        if is_debugging():
            raise
        return fail(with_notes(error), failed_first=error.failed_first)


def usage() -> str:
    """The text of `hanayo --help`."""
    commands = "\n".join(f"  {name:<10}{meaning}" for name, (_, meaning) in COMMANDS.items())
    return (
        "usage: hanayo <command> [options]\n\n"
        'Wave pipelines for PyTorch Lightning: Trainer(strategy="hanayo") from the command line.\n\n'
        f"commands:\n{commands}\n\n"
        "options:\n  -h, --help  show this help\n  --version   show the installed version\n\n"
        "exit codes:\n"
        "  0    done\n"
        "  1    failed, on any rank; what 1 means for other commands says their --help\n"
        "  2    a mistake in options, files or the model, in one line\n"
        "  75   stopped by SIGTERM, after a batch and with a checkpoint: start it again\n"
        "  130  interrupted by Ctrl-C, in the same way\n\n"
        "With HANAYO_DEBUG=1 in the environment, errors are shown with their whole traceback.\n"
        "For the options of a command: hanayo <command> --help\n"
        "Example: hanayo init my-gpt && cd my-gpt && hanayo fit --config wave.yaml"
    )
