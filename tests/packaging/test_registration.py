"""The registration, each case in a process of its own: what is imported when, and in which order, is the point."""

import os
import sys
from textwrap import dedent

import pytest

from tests.harness import limits


def play(code: str, **environment: str) -> str:
    """What `code` prints in a fresh process that has `lightning_hanayo._autoload` as `autoload`."""
    code = "import sys, warnings\nwarnings.simplefilter('ignore')\n" + dedent(code)
    environment = os.environ | environment
    done = limits.run([sys.executable, "-c", code], 100, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_module_that_torch_loads_needs_the_standard_library_only() -> None:
    loaded = play("""
        before = set(sys.modules)
        import lightning_hanayo._autoload
        print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
    """)
    assert set(loaded.split()) - {"lightning_hanayo"} <= set(sys.stdlib_module_names)


def test_a_later_import_of_lightning_finds_the_strategy() -> None:
    assert play("""
        from lightning_hanayo._autoload import activate
        activate()
        activate()
        import lightning.pytorch.strategies as strategies
        print(strategies.StrategyRegistry.available_strategies().count("hanayo"))
        print(type(strategies.__spec__.loader).__name__, strategies.__loader__ is strategies.__spec__.loader)
        print(sum(type(finder).__name__ == "_Finder" for finder in sys.meta_path))
    """).splitlines() == ["1", "SourceFileLoader True", "1"]


def test_an_earlier_import_of_lightning_finds_it_too_and_twice_is_no_error() -> None:
    """And nothing happens where the autoload is switched off, until the package itself is imported."""
    assert play(
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
def test_a_failure_of_ours_stays_ours() -> None:
    assert (
        play("""
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


def test_the_other_lightning_says_which_one_is_supported() -> None:
    pytest.importorskip("pytorch_lightning")
    said = play("""
        from lightning_hanayo._autoload import activate
        activate()
        import pytorch_lightning
        try:
            pytorch_lightning.Trainer(strategy="hanayo", logger=False, enable_checkpointing=False)
        except ValueError as error:
            print(error)
    """)
    assert "lightning.pytorch" in said and "pytorch_lightning" in said
