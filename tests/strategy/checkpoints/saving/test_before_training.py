"""What would make every save fail is an error before the first batch, the same on all ranks."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_hanayo.errors import UnsupportedError
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer


class Odd:
    """Of a class that only pickle could store."""


class OddState(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"history": [Odd()]}


class NotYet(Callback):
    """Has no state before training."""

    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("history")


class WithHyperparameters(models.MLP):
    def __init__(self, width: int, odd: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def fit(folder: Path | None, module: Any = None, options: Any = None, strategy: Any = None) -> list[str]:
    """Train a step with a callback that saves, and return the warnings."""
    callbacks = [ModelCheckpoint(folder, **(options or {}).pop("saves", {}))] if folder is not None else []
    callbacks += (options or {}).pop("callbacks", [])
    made = make_strategy(Layout(2), **(strategy or {}))
    settings = {"enable_checkpointing": folder is not None, "max_steps": 1, "callbacks": callbacks, "strategy": made}
    trainer = make_trainer(Layout(2), **settings | (options or {}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module or models.build(models.MLP), make_loader(models.vectors((8,))))
    return [str(one.message) for one in caught if "hyperparameters" in str(one.message)]


def test_a_folder_that_cannot_be_written(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFailed, match=r"rank 0 can't write to .*/file/checkpoints \(Not a directory\)"):
        pool.run(2, fit, tmp_path / "file" / "checkpoints")


@pytest.mark.thorough
def test_nothing_is_left_of_the_attempt(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, fit, tmp_path / "new" / "folder", None, {"saves": {"save_top_k": 0}})
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_the_state_of_a_callback(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"the state_dict\(\) of OddState\['history'\]\[0\].*save_full=True"):
        pool.run(2, fit, tmp_path, None, {"callbacks": [NotYet(), OddState()]})


def test_hyperparameters_are_left_out_with_a_warning(pool: Pool, tmp_path: Path) -> None:
    said, _ = pool.run(2, fit, tmp_path, WithHyperparameters(3, Odd()))
    assert len(said) == 1 and "hyperparameters of WithHyperparameters" in said[0] and "odd" in said[0]
    assert "width" not in said[0]


@pytest.mark.thorough
def test_a_link_to_what_is_not_complete_yet(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="save_last='link'.*Set save_last=True"):
        pool.run(2, fit, tmp_path, None, {"saves": {"save_last": "link"}}, {"save_async": True})


def test_a_plugin_that_writes_files() -> None:
    with pytest.raises(UnsupportedError, match=r"AsyncCheckpointIO writes what rank 0 holds.*save_async=True"):
        fit(None, None, {"plugins": [AsyncCheckpointIO()]})
