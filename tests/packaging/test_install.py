"""Normal and editable installs, in new virtual environments that use the installed dependencies."""

import json
import os
import re
import shutil
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_hanayo.cli.init import recipes
from tests.harness import limits

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Install:
    """A virtual environment, and the package directory that it imports."""

    python: Path
    package: Path
    folder: Path

    def run(self, code: str) -> str:
        """The output of `code` in a process of this environment, outside of any checkout."""
        return self._output(["python", "-c", "import sys, warnings\nwarnings.simplefilter('ignore')\n" + code])

    def hanayo(self, *arguments: str, inside: str = ".") -> str:
        """The output of the console script, run in the folder `inside`."""
        return self._output(["hanayo", *arguments], inside)

    def _output(self, command: list[str], inside: str = ".") -> str:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        program = [self.python.parent / command[0], *command[1:]]
        done = limits.run(program, 100, cwd=self.folder / inside, env=variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @contextmanager
    def broken(self) -> Iterator[None]:
        """In this context the package can't be imported."""
        source = self.package / "__init__.py"
        text = source.read_text()
        source.write_text("def broken(:\n")
        try:
            yield
        finally:
            source.write_text(text)


@pytest.fixture(scope="module", params=["normal", pytest.param("editable", marks=pytest.mark.thorough)])
def install(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Install:
    folder = tmp_path_factory.mktemp(request.param)
    checkout = folder / "checkout"
    for name in ("lightning_hanayo", "recipes"):
        shutil.copytree(ROOT / name, checkout / name, ignore=lambda *_: ["__pycache__"])
    for name in ("pyproject.toml", "hatch_build.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, checkout / name)

    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)}, scheme="venv")
    borrowed = [path for path in sys.path if Path(path).name == "site-packages"]
    Path(paths["purelib"], "zz_borrowed.pth").write_text("\n".join(borrowed) + "\n")

    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
    how = ["--no-deps", "--no-build-isolation", "--ignore-installed"]
    target = ["--editable", str(checkout)] if request.param == "editable" else [str(checkout)]
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    done = limits.run([*pip, *how, *target], 100, env=variables)
    assert done.returncode == 0, done.stderr
    home = checkout if request.param == "editable" else Path(paths["purelib"])
    return Install(python, home / "lightning_hanayo", folder)


@pytest.mark.parametrize("install", ["normal", pytest.param("editable", marks=pytest.mark.thorough)], indirect=True)
def test_trainer_finds_the_strategy_without_an_import(install: Install) -> None:
    output = install.run("""
import lightning as L
from lightning.pytorch.strategies import StrategyRegistry
print("hanayo" in StrategyRegistry, "lightning_hanayo" in sys.modules)
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="hanayo", logger=False, enable_checkpointing=False)
print(type(trainer.strategy).__name__)
import lightning_hanayo
print(lightning_hanayo.__file__)
""")
    assert output.splitlines()[-3:] == ["True False", "HanayoStrategy", str(install.package / "__init__.py")]


@pytest.mark.thorough
@pytest.mark.parametrize("install", ["editable"], indirect=True)
def test_torch_and_lightning_work_with_a_broken_package(install: Install) -> None:
    with install.broken():
        output = install.run("""
import torch
import lightning as L
L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
try:
    import lightning_hanayo
except SyntaxError:
    print("torch", torch.ones(2).sum().item())
""")
    assert output.splitlines()[-1] == "torch 2.0"


@pytest.mark.thorough  # tox -e package does the same with the wheel
@pytest.mark.parametrize("install", ["normal", "editable"], indirect=True)
def test_a_recipe_trains_without_the_checkout(install: Install) -> None:
    """Two steps on two processes, with what `hanayo init` copies."""
    assert install.hanayo("init", "my-gpt").splitlines()[-1] == "hanayo fit --config wave.yaml"
    trainer = {
        "devices": 2,
        "strategy": {"class_path": "lightning_hanayo.HanayoStrategy", "init_args": {"data_parallel_size": 1}},
        "max_steps": 2,
        "limit_val_batches": 0,
        "logger": False,
        "callbacks": [],
    }
    small = install.folder / "my-gpt" / "small.yaml"
    small.write_text(json.dumps({"trainer": trainer, "data": {"init_args": {"max_bytes": 200_000}}}))
    output = install.hanayo("fit", "--config", "wave.yaml", "--config", "small.yaml", inside="my-gpt")
    assert "train loss" in output


@pytest.mark.parametrize("install", ["normal"], indirect=True)
def test_the_wheel_holds_the_recipes_and_no_benchmarks(install: Install) -> None:
    copies = install.package / "_recipes"
    assert sorted(place.name for place in copies.iterdir()) == list(recipes(ROOT / "recipes"))
    assert (copies / "gpt" / "wave.yaml").is_file()


def test_a_package_index_shows_no_broken_links(install: Install) -> None:
    readme = install.run("import importlib.metadata as m; print(m.metadata('lightning-hanayo').get_payload())")
    assert readme.startswith("# lightning_hanayo\n") and "Trainer(accelerator=" in readme
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", readme))
    assert "One step of the demo" not in readme, "a picture's caption"


def test_console_script_runs(install: Install) -> None:
    assert "fit" in install.hanayo("--help")
