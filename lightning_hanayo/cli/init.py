"""Runs `hanayo init`: copies a recipe into a new folder, where it runs and can be changed.

    recipes/gpt/wave.yaml   class_path: recipes.gpt.module.GPT   ->   DIR/wave.yaml       class_path: gpt.module.GPT
    recipes/gpt/module.py                                        ->   DIR/gpt/module.py

The Python files stay a package with the recipe's name, so that importing it still registers its blocks. The packages of
other recipes that it uses are copied, too.
"""

import ast
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning_hanayo
from lightning_hanayo.cli.common import CommandParser
from lightning_hanayo.errors import HanayoError, nearest, writing

_USAGE = "hanayo init DIR [--recipe NAME] | hanayo init --list"
_FIRST_CONFIG = "wave.yaml"


def run(argv: Sequence[str]) -> int:
    """Copy the recipe, or list all, and return the exit code."""
    options = _parser().parse_args(argv[1:])
    summaries = recipes(recipes_folder())
    if options.list:
        lines = [f"{name:<10}{summary}" for name, summary in summaries.items()]
        print(json.dumps(summaries) if options.json else "\n".join(lines))
        return 0
    if options.folder is None:
        raise HanayoError(f"init needs a folder to create: {_USAGE}")
    if options.recipe not in summaries:
        raise HanayoError(f"unknown recipe {options.recipe!r}; {nearest(options.recipe, summaries)}")
    folder = Path(options.folder)
    copies = copied(options.recipe, recipes_folder())
    _write(copies, folder)
    if options.json:
        print(json.dumps({"folder": str(folder), "recipe": options.recipe, "files": sorted(copies)}))
    else:
        tops = dict.fromkeys(name.partition("/")[0] + "/" * ("/" in name) for name in copies)
        print(f"# {summaries[options.recipe]}: {', '.join(tops)} in {folder}. To train it:")
        print(f"cd {shlex.quote(str(folder))}\nhanayo fit --config {_FIRST_CONFIG}")
    return 0


def _parser() -> CommandParser:
    about = "Copy a recipe into a new folder: a model, data and YAML configurations. Then print how to train it."
    parser = CommandParser("hanayo init", about, usage=_USAGE)
    parser.add_argument("folder", nargs="?", metavar="DIR", help="the folder to create; it may exist if it is empty")
    parser.add_argument("--recipe", default="gpt", metavar="NAME", help="which recipe (default: gpt)")
    parser.add_argument("--list", action="store_true", help="list the recipes, and end")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def recipes_folder() -> Path:
    """Where the recipes are: inside an installed package, or next to the package in a checkout."""
    package = Path(lightning_hanayo.__file__).parent
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def recipes(root: Path) -> Mapping[str, str]:
    """The recipes in `root` by name, each with the first sentence of its package's docstring.

    A recipe is a package with a `wave.yaml`; benchmarks have none.
    """
    summaries = {}
    for folder in sorted(config.parent for config in root.glob(f"*/{_FIRST_CONFIG}")):
        module = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
        paragraph = (ast.get_docstring(module) or "").split("\n\n")[0].replace("\n", " ")
        summaries[folder.name] = paragraph.split(". ")[0].rstrip(".")
    return summaries


def copied(recipe: str, root: Path) -> Mapping[str, str]:
    """The text of each file of the new folder, by its path in it."""
    copies = {
        f"{recipe}/{file.name}" if file.suffix == ".py" else file.name: _renamed(file, recipe)
        for file in _files(root / recipe)
    }
    for other in _used(recipe, root)[1:]:
        modules = [file for file in _files(root / other) if file.suffix == ".py"]
        copies |= {f"{other}/{file.name}": _renamed(file, recipe) for file in modules}
    return copies


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def _used(recipe: str, root: Path) -> list[str]:
    """The recipe, and those whose packages it imports, directly or through each other."""
    names = [recipe]
    for name in names:  # grows meanwhile
        texts = [file.read_text(encoding="utf-8") for file in _files(root / name) if file.suffix == ".py"]
        imported = re.findall(r"^\s*(?:from|import) recipes\.(\w+)", "\n".join(texts), re.MULTILINE)
        names += [other for other in dict.fromkeys(imported) if other not in names]
    return names


def _renamed(file: Path, recipe: str) -> str:
    """The text of `file`: modules without the package `recipes`, paths that start in the folder, no links out of it."""
    text = re.sub(r"\brecipes\.(?=[a-z])", "", file.read_text(encoding="utf-8"))
    text = re.sub(r"\[([^]]+)\]\(\.\./[^)]*\)", r"\1", text)
    text = re.sub(rf"\brecipes/({recipe}/\w+\.py)", r"\1", text)
    return re.sub(rf"\brecipes/{recipe}/", "", text)


def _write(copies: Mapping[str, str], folder: Path) -> None:
    """Write the files into `folder`, which must not exist or be empty."""
    if folder.exists() and not folder.is_dir():
        raise HanayoError(f"{folder} is a file; name a new folder")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise HanayoError(f"{folder} is not empty; name a new folder")
        for name, text in copies.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
