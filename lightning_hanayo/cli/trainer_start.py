"""Starts `fit`, `validate`, `test` and `predict`: mistakes that show in the arguments alone are reported at once.

Only then torch and Lightning are imported, which takes seconds.

Checks the configuration files of a command before they are parsed: one line says which file is wrong, and where.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.files import read_text, refusing


def run(argv: list[str]) -> int:
    """Run one of the four commands."""
    command, *args = argv
    if not any(one in ("-h", "--help") or one.partition("=")[0].endswith(".help") for one in args):
        check_configuration(command, args)
    return int(import_module("lightning_hanayo.cli.trainer").run(argv))


def check_configuration(command: str, args: Sequence[str]) -> None:
    """Check that `args` give a configuration or a model, and that each configuration is a file as it should be.

    Raises:
        HanayoError: one is missing or malformed.
    """
    if not any(one.startswith(("--config", "-c", "--model", "--print_config")) for one in args):
        file = next((one for one in args if one.endswith((".yaml", ".yml"))), "FILE")
        needed = f"{command} needs a configuration, or at least a model: hanayo {command} --config {file}"
        raise HanayoError(f"{needed}. To start from an example: hanayo init DIR. All options: hanayo fit --help")
    for path in config_files(args):
        if not path.exists() and path.suffix in (".yaml", ".yml", ".json"):
            raise HanayoError(f"--config {path}: there is no such file{_others(path)}")
    check_config_files(args)
    check_complete(args)


def _others(path: Path) -> str:
    """The configurations in the same folder, or how to get one."""
    found = sorted(one.name for one in path.parent.glob("*" + path.suffix))[:8] if path.parent.is_dir() else []
    if not found:
        return "; to start from an example: hanayo init DIR"
    return f"; in {path.parent} are {', '.join(found)}"


MAX_BYTES = 16 << 20
_SECTIONS = ("trainer", "report")
_WITH_CLASS = ("model", "data")


def config_files(args: Sequence[str]) -> list[Path]:
    """What is given as `--config FILE`, whether there is such a file or not."""
    paths = []
    for option, value in zip(args, [*args[1:], ""], strict=True):
        name, _, joined = option.partition("=")
        if name in ("--config", "-c") and (joined or value):
            paths.append(Path(joined or value))
    return paths


def check_config_files(args: Sequence[str]) -> None:
    """Check each file that is given as `--config FILE`. A parser reads them next, and says if one is missing.

    Raises:
        HanayoError: a file is no text, no YAML, no mapping, or has a key twice.
    """
    for path in config_files(args):
        if path.is_file():
            check_config_file(path)


def check_complete(args: Sequence[str]) -> None:
    """Check that a file which sets options of the model or the data comes with one that says which class they are.

    Raises:
        HanayoError: none does.
    """
    sections = {path: _sections(path) for path in config_files(args) if path.is_file()}
    for name in _WITH_CLASS:
        if any(_names_class(one.get(name)) for one in sections.values()) or any(
            one.partition("=")[0] == f"--{name}" for one in args
        ):
            continue
        for path, found in sections.items():
            if isinstance(found.get(name), Mapping):
                way_out = f"give the configuration that it changes first: --config {_base(path, name)} --config {path}"
                raise HanayoError(f"{path} sets options of the {name}, but nothing says which class that is; {way_out}")


def _base(path: Path, name: str) -> str:
    """The first configuration in the same folder that names a class, or what it would be."""
    others = sorted(path.parent.glob("*.yaml"), key=lambda one: (one.stem != "wave", one))
    return next((str(one) for one in others if _names_class(_sections(one).get(name))), "FILE")


def _sections(path: Path) -> Mapping[str, object]:
    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _names_class(section: object) -> bool:
    return isinstance(section, str) or (isinstance(section, Mapping) and "class_path" in section)


def check_config_file(path: Path) -> None:
    """Check one file."""
    with refusing(path, "configuration", "sections such as trainer, model and data"):
        try:
            root = yaml.compose(read_text(path, MAX_BYTES), Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            raise HanayoError(_reason(error)) from None
        _check_unique(root)
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "empty" if root is None else "a single value"
            raise HanayoError(f"it is {kind}")
        for key, value in root.value:
            if key.value in _SECTIONS and not isinstance(value, yaml.MappingNode):
                raise HanayoError(f"line {_line(key)}: {key.value} must be a mapping of its options")


def _check_unique(root: yaml.Node | None) -> None:
    """Check that no mapping has a key twice."""
    nodes, seen = [root], set()
    for node in nodes:  # grows meanwhile; an anchor's node comes once
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        first: dict[str, yaml.Node] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            before = first.setdefault(str(key.value), key)
            if before is not key and key.value != "<<":
                raise HanayoError(f"line {_line(key)}: {key.value} is given twice, first in line {_line(before)}")
            nodes.append(value)
        if isinstance(node, yaml.SequenceNode):
            nodes.extend(node.value)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _reason(error: yaml.YAMLError) -> str:
    """The problem and its place, in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return " ".join(str(error).split())
    if "'\\t'" in problem:
        problem += "; indent with spaces"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
