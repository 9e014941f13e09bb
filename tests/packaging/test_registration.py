"""The registration works whatever is imported first. Each case runs in a new process, since imports matter."""

import json
import os
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from lightning_hanayo.dist_checkpointing.state import STATE, StateDocument
from tests.checkpoint.folders import write_folder
from tests.harness import limits


def run(code: str, **environment: str) -> str:
    """The output of `code` in a new process."""
    code = "import sys, warnings\nwarnings.simplefilter('ignore')\n" + dedent(code)
    environment = os.environ | environment
    done = limits.run([sys.executable, "-c", code], 100, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_autoload_imports_only_the_standard_library() -> None:
    loaded = run("""
        before = set(sys.modules)
        import lightning_hanayo._autoload
        print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
    """)
    assert set(loaded.split()) - {"lightning_hanayo"} <= set(sys.stdlib_module_names)


@pytest.mark.thorough
def test_strategy_is_registered_if_lightning_is_imported_later() -> None:
    assert run("""
        from lightning_hanayo._autoload import activate
        activate()
        activate()
        import lightning.pytorch.strategies as strategies
        print(strategies.StrategyRegistry.available_strategies().count("hanayo"))
        print(type(strategies.__spec__.loader).__name__, strategies.__loader__ is strategies.__spec__.loader)
        print(sum(type(finder).__name__ == "_Finder" for finder in sys.meta_path))
    """).splitlines() == ["1", "SourceFileLoader True", "1"]


@pytest.mark.thorough  # the other order is the usual one
def test_strategy_is_registered_if_lightning_was_imported_before() -> None:
    """A second registration is no error. With the autoload switched off, importing the package registers it."""
    assert run(
        """
        import lightning.pytorch.strategies as strategies
        print("hanayo" in strategies.StrategyRegistry)
        from lightning_hanayo._autoload import activate, register
        activate()
        register()
        print("hanayo" in strategies.StrategyRegistry, "lightning_hanayo.strategy" in sys.modules)
        strategies.StrategyRegistry.pop("hanayo")
        import lightning_hanayo.strategy
        print("hanayo" in strategies.StrategyRegistry)
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    ).splitlines() == ["False", "True False", "True"]


@pytest.mark.thorough  # test_install covers it with an installed package that is broken
def test_a_failing_registration_does_not_reach_the_user() -> None:
    assert (
        run("""
        import lightning_hanayo._autoload as autoload
        def broken():
            raise RuntimeError("broken")
        autoload.register = broken
        autoload.activate()
        sys.meta_path.insert(0, autoload._Finder())
        import lightning.pytorch.strategies
        print("fine")
    """)
        == "fine"
    )


def test_pytorch_lightning_becomes_another_name_of_lightning() -> None:
    """Each module of it is the same object, with its own name and spec, wherever it is imported first."""
    output = run("""
        import lightning_hanayo.pytorch_lightning
        from pytorch_lightning.utilities.model_helpers import is_overridden
        import lightning.pytorch, lightning.pytorch.callbacks, lightning.pytorch.serve, lightning.fabric.utilities.seed
        import pytorch_lightning, pytorch_lightning.callbacks, pytorch_lightning.serve, lightning_fabric.utilities.seed
        others = [name for name in sys.modules if name.startswith(("pytorch_lightning", "lightning_fabric"))]
        for name in others:
            real = name.replace("_lightning", ".lightning").replace("pytorch.lightning", "lightning.pytorch")
            module = sys.modules[real.replace("lightning_fabric", "lightning.fabric")]
            assert sys.modules[name] is module and module.__name__ == module.__spec__.name, name
        print(len(others), is_overridden.__module__)
        print(pytorch_lightning.Trainer(strategy="hanayo", accelerator="cpu", logger=False).strategy.strategy_name)
        try:
            import pytorch_lightning.missing
        except ModuleNotFoundError as error:
            print(error)
    """)
    assert output.splitlines() == [
        "8 lightning.pytorch.utilities.model_helpers",
        "hanayo",
        "No module named 'pytorch_lightning.missing'",
    ]


@pytest.mark.thorough
def test_pytorch_lightning_gives_errors_that_name_the_way_out() -> None:
    pytest.importorskip("pytorch_lightning")
    output = run("""
        from lightning_hanayo._autoload import activate
        activate()
        import pytorch_lightning
        class Model(pytorch_lightning.LightningModule):
            pass
        from lightning_hanayo import HanayoStrategy
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy = HanayoStrategy()
        print(*[one.message for one in caught])
        def refused(call):
            try:
                call()
            except ValueError as error:
                print(error)
        refused(lambda: pytorch_lightning.Trainer(strategy=strategy, accelerator="cpu", devices=2))
        refused(lambda: pytorch_lightning.Trainer(strategy="hanayo"))
        refused(lambda: __import__("lightning_hanayo.pytorch_lightning"))
    """)
    mixed, given, named, late = output.splitlines()
    way_out = "put `import lightning_hanayo.pytorch_lightning` above all other imports"
    assert "Model is a LightningModule of `pytorch_lightning`" in mixed and way_out in mixed
    assert "this Trainer comes from `pytorch_lightning`" in given and way_out in given
    assert "this Trainer comes from `pytorch_lightning`" in named
    assert "pytorch_lightning was imported before lightning_hanayo.pytorch_lightning" in late


@pytest.mark.thorough
def test_folders_are_read_without_an_import_of_the_package(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    document, _ = StateDocument(
        checkpoint={
            "pytorch-lightning_version": "2.6.6",
            "epoch": 0,
            "global_step": 1,
            "loops": {},
            "hyper_parameters": {},
        },
        names=["weight"],
        tied={},
        values={},
        versions={},
        optimizers=None,
    ).encode()
    write_folder(tmp_path / "a.ckpt", {"model/weight": weight}, texts={STATE: json.dumps(document).encode()})
    assert run(f"""
        from lightning_hanayo._autoload import activate
        activate()
        import lightning.pytorch as pl, torch
        class Model(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(2, 3))
        print("lightning_hanayo.dist_checkpointing" in sys.modules)
        print(Model.load_from_checkpoint({str(tmp_path / "a.ckpt")!r}).weight.flatten().tolist())
        print("lightning_hanayo.strategy" in sys.modules)
        try:
            torch.load({str(tmp_path / "a.ckpt")!r})
        except IsADirectoryError as error:
            print("hanayo ckpt export" in str(error))
    """).splitlines() == ["False", "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]", "False", "True"]
