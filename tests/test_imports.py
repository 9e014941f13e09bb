"""The files of the package don't import each other in circles, and no folder has more than 30 files.

Imports inside functions and under TYPE_CHECKING count, too: in a circle, no file can be understood without the others.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_hanayo"
MAX_FILES = 30
"""Python files in one folder, with its __init__.py"""

ALLOWED = {
    # The package's own names are imported on first use, so that `import lightning_hanayo.schedule` loads no torch.
    (PACKAGE, f"{PACKAGE}.strategy"),
    (PACKAGE, f"{PACKAGE}.checking"),
    (PACKAGE, f"{PACKAGE}.chunked_loss"),
}


@cache
def files() -> dict[str, Path]:
    """The package's modules, by their names."""
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """All names that a file imports: `from a import b` gives "a.b", which may be a module or in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(path: Path) -> set[str]:
    """The package's modules that a file imports."""
    names = set(imported_names(ast.parse(path.read_text(encoding="utf-8"))))
    return {name if name in files() else name.rpartition(".")[0] for name in names} & files().keys()


def first_circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle, from one of them back to it; none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(module) for module in error.args[1]]
    return []


def test_a_circle_is_found() -> None:
    assert first_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) in (["b", "c", "b"], ["c", "b", "c"])
    assert first_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_imports_in_functions_and_for_type_checking_count() -> None:
    code = "import a.b\ndef f():\n    from c import d\nif TYPE_CHECKING:\n    from e import f, g as h"
    assert set(imported_names(ast.parse(code))) == {"a.b", "c.d", "e.f", "e.g"}


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {name: imported_modules(path) - {name} for name, path in files().items()}
    for importer, imported in ALLOWED:
        graph[importer].remove(imported)
    assert " -> ".join(first_circle(graph)) == ""


def test_no_folder_has_too_many_files() -> None:
    sizes = Counter(path.parent.relative_to(ROOT).as_posix() for path in files().values())
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES} == {}
