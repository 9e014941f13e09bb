"""`hanayo init`: each recipe is whole in its new folder, and a mistake gives one line before anything is written."""

import ast
import json
from pathlib import Path

import pytest
import yaml

from lightning_hanayo import cli
from lightning_hanayo.cli.init import recipes, recipes_folder

RECIPES = recipes(recipes_folder())


def test_the_list_says_what_each_recipe_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "gpt       A small GPT on real text" in lines
    assert [line.split(maxsplit=1)[0] for line in lines] == list(RECIPES)
    assert all(RECIPES.values()), "each package has a docstring"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_needs_nothing_of_the_checkout(recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "copy"
    assert cli.run(["init", str(folder), "--recipe", recipe]) == 0
    assert (folder / "wave.yaml").is_file()
    copies = {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*") if file.is_file()}
    packages = {name.partition("/")[0] for name in copies if "/" in name}
    for name, text in copies.items():
        assert "recipes." not in text and f"recipes/{recipe}/" not in text and "](../" not in text, name
        if name.endswith(".py"):
            compile(text, name, "exec")
    for module in {one for text in copies.values() for one in _modules(text, packages)}:
        assert f"{module.replace('.', '/')}.py" in copies, module


def _modules(text: str, packages: set[str]) -> list[str]:
    """The modules of `packages` that Python code imports, or whose classes a configuration names."""
    try:
        imports = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.ImportFrom)]
        names = [one.module or "" for one in imports]
    except SyntaxError:
        values = _values(yaml.safe_load(text)) if "class_path" in text else []
        names = [value.rpartition(".")[0] for value in values]
    return [name for name in names if name.partition(".")[0] in packages]


def _values(node: object) -> list[str]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    return [node] if isinstance(node, str) else [value for child in children for value in _values(child)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_one_folder_of_text(recipe: str) -> None:
    for place in (recipes_folder() / recipe).iterdir():
        assert place.name == "__pycache__" or place.read_text(encoding="utf-8"), place


def test_the_folder_may_exist_if_it_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my gpt"
    folder.mkdir()
    assert cli.run(["init", str(folder)]) == 0
    what, *commands = capsys.readouterr().out.splitlines()
    assert what.startswith("# A small GPT on real text: README.md, gpt/, ") and what.endswith("To train it:")
    assert commands == [f"cd '{folder}'", "hanayo fit --config wave.yaml"]
    assert "class_path: gpt.module.GPT\n" in (folder / "wave.yaml").read_text()
    assert '"gpt.module.Block"' in (folder / "gpt" / "__init__.py").read_text()
    assert "#   hanayo fit --config wave.yaml\n" in (folder / "wave.yaml").read_text()


def test_json_lists_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", str(tmp_path / "new"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["recipe"] == "gpt" and "gpt/module.py" in result["files"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["new", "--recipe", "gtp"], "unknown recipe 'gtp'; did you mean 'gpt'? Known: "),
        (["."], ". is not empty; name a new folder"),
        (["notes.txt"], "notes.txt is a file; name a new folder"),
        (["notes.txt/new"], "notes.txt/new can't be written: Not a directory"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine\n")
    assert cli.run(["init", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"hanayo: error: {says}")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
