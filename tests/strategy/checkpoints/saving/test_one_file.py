"""One file of several ranks: written by the user's plugin, and all ranks hear when it can't be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer


class Marked(TorchCheckpointIO):
    """Leaves a mark in each file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        super().save_checkpoint({**checkpoint, "mark": storage_options}, path)


def save(path: Path, plugins: list[Any], storage_options: Any) -> None:
    trainer = make_trainer(Layout(2), max_steps=1, strategy=make_strategy(Layout(2), save_full=True), plugins=plugins)
    trainer.fit(models.build(models.MLP), make_loader(models.vectors((8,))))
    trainer.save_checkpoint(path, storage_options=storage_options)
    trainer.strategy.remove_checkpoint(path.parent / "none.ckpt")


@pytest.mark.thorough
def test_a_plugin_writes_it(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save, tmp_path / "marked.ckpt", [Marked()], "blue")
    saved = torch.load(tmp_path / "marked.ckpt", weights_only=True)
    assert saved["mark"] == "blue" and saved["state_dict"].keys() == models.MLP().state_dict().keys()


@pytest.mark.thorough
def test_all_ranks_hear_that_it_cannot_be_written(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFailed, match="rank 1 CheckpointError: rank 0: .*file/one.ckpt was not saved"):
        pool.run(2, save, tmp_path / "file" / "one.ckpt", [], None)
