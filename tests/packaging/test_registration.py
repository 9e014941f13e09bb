"""The registration works whatever is imported first. Each case runs in a new process, since imports matter."""

import os
import sys
from textwrap import dedent

import pytest

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


@pytest.mark.thorough
def test_pytorch_lightning_gives_an_error_that_names_the_supported_package() -> None:
    pytest.importorskip("pytorch_lightning")
    output = run("""
        from lightning_hanayo._autoload import activate
        activate()
        import pytorch_lightning
        try:
            pytorch_lightning.Trainer(strategy="hanayo", logger=False, enable_checkpointing=False)
        except ValueError as error:
            print(error)
    """)
    assert "lightning.pytorch" in output and "pytorch_lightning" in output
