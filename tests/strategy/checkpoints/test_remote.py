"""`ModelCheckpoint(dirpath="objects://...")`: folders on a file system without rename, whose lists are late.

run 1    epoch 0, 1      the best, last.ckpt      objects:///tmp/.../last.ckpt/manifest.json is put last
run 2    resumed         the same again           what top-k removes is gone
"""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hanayo import cli
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from tests.harness import models
from tests.harness.object_store import ObjectStore
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout
from tests.strategy.checkpoints.saving_runs import Scored, fit, quiet, trainer_for

PIPE = Layout(2)


class LateLists(ObjectStore):
    """A list shows an object only the second time: reading it by its name works at once."""

    cachable = True  # one instance for each process

    def __init__(self) -> None:
        super().__init__()
        self._listed: set[str] = set()

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Leave out what wasn't there when it was last asked."""
        found = super().ls(path, detail=True, **options)
        shown = [one for one in found if one["type"] == "directory" or one["name"] in self._listed]
        self._listed |= {one["name"] for one in found}
        return shown if detail else [one["name"] for one in shown]


def train(url: str, epochs: int, start: str | None, **options: Any) -> tuple[str, str]:
    """Train on one rank, and return the paths of the best and of the last checkpoint."""
    LateLists.register()
    saving = ModelCheckpoint(url, "{epoch}", monitor="score", mode="max", save_top_k=1, save_last=True)
    with quiet():
        trainer = trainer_for(PIPE, [saving], strategy=options, max_epochs=epochs)
        fit(trainer, models.build(Scored), PIPE, start)
    return saving.best_model_path, saving.last_model_path


@pytest.mark.parametrize("in_background", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_run_saves_removes_and_resumes(pool: Pool, tmp_path: Path, in_background: bool) -> None:
    url = f"objects://{tmp_path}/run"
    options = (f"{url}/last.ckpt",)
    assert pool.run(2, _train, url, 1, None, in_background) == [(f"{url}/epoch=0.ckpt", *options)] * 2
    assert pool.run(2, _train, url, 4, *options, in_background) == [(f"{url}/epoch=1.ckpt", *options)] * 2
    assert {path.parent.name for path in (tmp_path / "run").glob("*/*")} == {"epoch=1.ckpt", "last.ckpt"}
    LateLists.register()
    for name in ("epoch=1.ckpt", "last.ckpt"):
        folder = CheckpointFolder(f"{url}/{name}")
        assert folder.manifest.step == 4
        assert cli.run(["ckpt", "verify", f"{url}/{name}"]) == 0
        kept = {path.name for path in (tmp_path / "run" / name).iterdir()}
        assert kept == {"manifest.json", *folder.manifest.files}


def _train(url: str, epochs: int, start: str | None, in_background: bool) -> tuple[str, str]:
    return train(url, epochs, start, save_async=in_background)


@pytest.mark.thorough
def test_a_folder_without_manifest_is_refused(pool: Pool, tmp_path: Path) -> None:
    url = f"objects://{tmp_path}/run"
    pool.run(2, _train, url, 1, None, False)
    (tmp_path / "run" / "last.ckpt" / "manifest.json").unlink()
    with pytest.raises(RunFailed) as failed:
        pool.run(2, _train, url, 2, f"{url}/last.ckpt", False)
    assert f"{url}/last.ckpt has no manifest.json" in failed.value.first.message


@pytest.mark.thorough
def test_a_link_is_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="only supported for local file paths"):
        pool.run(2, link, f"objects://{tmp_path}/run")


def link(url: str) -> None:
    """Ask for a symbolic link, which an object store doesn't have."""
    LateLists.register()
    fit(trainer_for(PIPE, [ModelCheckpoint(url, save_last="link")]), models.build(Scored), PIPE)
