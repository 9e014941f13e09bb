"""Starts `fit`, `validate`, `test` and `predict`: help and mistakes that show in the arguments alone come at once.

Only then torch and Lightning are imported, which takes seconds.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lightning_hanayo.cli.config_files import check_complete, check_config_files, config_files
from lightning_hanayo.cli.trainer_help import usage
from lightning_hanayo.errors import HanayoError

_HELP = ("-h", "--help")


def run(argv: list[str]) -> int:
    """Run one of the four commands."""
    command, *args = argv
    if args[-2:-1] and args[-2] in _HELP and args[-1] == "all":
        return _parse([*argv[:-2], "--help"])
    if any(one in _HELP for one in args):
        print(usage(command))
        return 0
    check_configuration(command, args)
    return _parse(argv)


def check_configuration(command: str, args: Sequence[str]) -> None:
    """Check that `args` give a configuration or a model, and that each configuration is a file as it should be.

    Raises:
        HanayoError: one is missing or malformed.
    """
    if not any(one.startswith(("--config", "-c", "--model", "--print_config")) for one in args):
        raise HanayoError(
            f"{command} needs a configuration, or at least a model: hanayo {command} --config FILE. "
            f"What to write in it: hanayo fit --help. To start from an example: hanayo init DIR"
        )
    for path in config_files(args):
        if not path.exists() and path.suffix in (".yaml", ".yml", ".json"):
            raise HanayoError(f"--config {path}: there is no such file{_others(path)}")
    check_config_files(args)
    check_complete(args)


def _parse(argv: list[str]) -> int:
    return int(import_module("lightning_hanayo.cli.trainer").run(argv))


def _others(path: Path) -> str:
    """The configurations in the same folder, or how to get one."""
    found = sorted(one.name for one in path.parent.glob("*" + path.suffix))[:8] if path.parent.is_dir() else []
    if not found:
        return "; to start from an example: hanayo init DIR"
    return f"; in {path.parent} are {', '.join(found)}"
