"""The site has every page, and builds without a warning; the project's files agree with the package."""

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lightning_hanayo
from lightning_hanayo import tensor_parallel
from lightning_hanayo.tensor_parallel.convert import block_specs
from tests.test_words import ROOT

DOCS = ROOT / "docs"


def test_every_page_is_in_the_sidebar() -> None:
    """Each is in the tree of one page: the index's, or that of a page in it, whose entries are folded."""
    listed = []
    for page in DOCS.rglob("*.md"):
        for tree in re.findall(r"```{toctree}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            names = re.findall(r"^(?!:)(?:.* <)?([\w/-]+)>?$", tree, re.MULTILINE)
            listed += [(page.parent / name).relative_to(DOCS).as_posix() for name in names]
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(pages - {"index"})


def test_every_option_is_in_a_table() -> None:
    page = (DOCS / "public.md").read_text(encoding="utf-8")
    tables = page[page.index("# Options") : page.index("## On the strategy")]
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", tables, re.MULTILINE))
    assert listed.pop("timeout") == "30 min"
    parameters = inspect.signature(lightning_hanayo.HanayoStrategy).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.name != "timeout"}
    assert {name: ast.literal_eval(cell) for name, cell in listed.items()} == defaults


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="needs Sphinx: pip install -e '.[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    options = ["--fail-on-warning", "--keep-going", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, DOCS, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "start.html").read_text(encoding="utf-8")
    assert 'href="guides/migrating.html#batch-size-and-learning-rate"' in page


def test_pictures_are_readable_at_page_width() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (picture,) = re.findall(r"^!\[.+?\]\((.+?\.png)\)", readme, re.MULTILINE)
    assert int.from_bytes((ROOT / picture).read_bytes()[16:20], "big") <= 1600


def test_the_workflow_runs_the_checks() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yaml").read_text(encoding="utf-8"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands and "tox -e docs" in commands


def test_the_project_files_have_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == lightning_hanayo.__version__
    assert lightning_hanayo.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_api_has_the_public_names() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", page, re.MULTILINE))
    for name in documented:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    wanted = {f"lightning_hanayo.{name}" for name in lightning_hanayo.__all__ if name != "__version__"}
    wanted |= {
        f"lightning_hanayo.tensor_parallel.{name}" for name in tensor_parallel.__all__ if name.lower().endswith("3d")
    }
    assert wanted - documented == set()


def test_the_table_of_models_names_every_registered_block() -> None:
    page = (DOCS / "supported" / "README.md").read_text(encoding="utf-8").lower().replace("-", "")
    for name in block_specs._BLOCKS:
        if name.startswith("tests."):  # one that a test before has registered
            continue
        family = name.split(".")[2] if name.startswith("transformers.") else name.rpartition(".")[2].lower()
        assert family in page, name
