"""Imports: schedules and plots load no torch, and no two files of the schedule package import each other."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lightning_hanayo.schedule as package


@pytest.mark.parametrize("name", ["lightning_hanayo.schedule", "lightning_hanayo.plotting"])
def test_neither_torch_nor_lightning_is_loaded(name: str) -> None:
    code = f"import sys, {name}; print([m for m in ('torch', 'lightning', 'numpy', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def imported(file: Path, modules: set[str]) -> Iterator[str]:
    """What a file imports of `modules`, in functions and for type checking too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, "imports name the whole path"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            yield from submodules or {node.module} & modules


def test_no_file_imports_itself_through_others() -> None:
    assert package.__file__ is not None
    root = Path(package.__file__).parent
    files = {".".join((package.__name__, *f.relative_to(root).with_suffix("").parts)): f for f in root.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): file for name, file in files.items()}
    graph = {name: set(imported(file, set(modules))) - {name} for name, file in modules.items()}
    assert sum(map(len, graph.values())) > 100
    order = list(TopologicalSorter(graph).static_order())
    assert len(order) == len(modules)
