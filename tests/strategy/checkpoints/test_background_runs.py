"""Whole runs that save in the background: what is kept, when a run ends, and where an error shows.

main thread      save 1   batch   save 2   remove 1   batch     ...   finish
background         write 1 ...     write 2 ............   remove 1
in the folder    -         1       1                  1 2   2
"""

import errno
import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.target import Point
from lightning_hanayo.errors import CheckpointError, PeerFailed
from tests.faults.saving_script import SAVER
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout
from tests.strategy.checkpoints.saving_runs import Left, Scored, fit, step_of, trainer_for

PIPE = Layout(2)


class Recorder(Saver):
    """While rank 0 writes, it lets the main thread go on to its next removal, and then looks at what is there."""

    folder: Path
    seen: list[dict[str, int]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, at=self._look, **options)
        self._removes, self._count = threading.Event(), 0

    def _look(self, point: Point) -> None:
        self._count += point == Point.COMMITTED
        if point == Point.GATHERED and self._count:
            assert self._removes.wait(60.0)
        if self._count and os.environ["RANK"] == "0" and point != Point.BEGUN:
            self.seen.append(
                {name: step_of(self.folder / name) for name in os.listdir(self.folder) if ".tmp" not in name}
            )

    def remove(self, path: str) -> None:
        """Remove it later, as usual."""
        super().remove(path)
        self._removes.set()


def keep_one(folder: Path) -> tuple[list[dict[str, int]], Left]:
    """Save after each epoch, and keep the last; return what was there all the time, and at the end."""
    Recorder.folder, Recorder.seen = folder, []
    with patch(SAVER, Recorder):
        trainer = trainer_for(PIPE, [ModelCheckpoint(folder, "{step}")], strategy={"save_async": True})
        fit(trainer, models.build(Scored), PIPE)
    trainer.strategy.barrier()
    return Recorder.seen, Left.in_folder(folder)


def test_the_old_checkpoint_is_kept_until_the_new_one_is_whole(pool: Pool, tmp_path: Path) -> None:
    (seen, left), _ = pool.run(2, keep_one, tmp_path)
    assert all(seen) and {"step=2.ckpt": 2} in seen
    assert left.steps == {"step=8.ckpt": 8}


def fail_at_third(folder: Path, error: OSError) -> tuple[str, int, str]:
    """Save after each step; rank 1's third save fails. Return the error of this rank, and its step."""
    warnings.filterwarnings("ignore", message=".*No checkpoint")
    saving = ModelCheckpoint(folder, save_top_k=0, save_last=True, every_n_train_steps=1)
    with patch(SAVER, partial(Saver, at=failing(3, error))):
        trainer = trainer_for(PIPE, [saving], strategy={"save_async": True})
        try:
            fit(trainer, models.build(Scored), PIPE)
        except (CheckpointError, PeerFailed) as raised:
            return type(raised).__name__, trainer.global_step, str(raised)
    raise AssertionError("no error")


def failing(save: int, error: OSError) -> Callable[[Point], None]:
    """Raise while rank 1 writes the n-th checkpoint."""
    count = 0

    def at(point: Point) -> None:
        nonlocal count
        count += point == Point.BEGUN
        if (count, point, os.environ["RANK"]) == (save, Point.HALF_WRITTEN, "1"):
            raise error

    return at


def test_an_error_in_the_background_shows_on_all_ranks_at_one_step(pool: Pool, tmp_path: Path) -> None:
    raised = pool.run(2, fail_at_third, tmp_path, OSError(errno.EIO, "Input/output error"))
    kinds, steps, messages = zip(*raised, strict=True)
    assert sorted(kinds) == ["CheckpointError", "PeerFailed"]
    assert len(set(steps)) == 1
    assert all("last.ckpt (step 3) was not saved" in text and "Input/output error" in text for text in messages)
    assert step_of(tmp_path / "last.ckpt") == 2


def same_names(folder: Path) -> list[str]:
    """Save four checkpoints that would have one name, and others for SLURM; return the names of the four."""
    slow = partial(Saver, at=lambda point: sleep(0.2) if point == Point.WRITTEN else None)
    with patch(SAVER, slow):
        saving = ModelCheckpoint(folder, "same", monitor="score", save_top_k=-1)
        trainer = trainer_for(PIPE, [saving, SavesForSlurm(folder)], strategy={"save_async": True})
        fit(trainer, models.build(Scored), PIPE)
    return sorted(os.path.basename(path) for path in saving.best_k_models)


class SavesForSlurm(Callback):
    """Saves as Lightning does before it lets SLURM end the job."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "hpc_ckpt_1.ckpt"

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, and look whether it is there."""
        trainer.save_checkpoint(self._path)
        assert step_of(self._path) == trainer.global_step


@pytest.mark.thorough
def test_no_name_is_given_twice_and_the_job_ends_with_a_whole_checkpoint(pool: Pool, tmp_path: Path) -> None:
    names = ["same-v1.ckpt", "same-v2.ckpt", "same-v3.ckpt", "same.ckpt"]
    assert pool.run(2, same_names, tmp_path)[0] == names
    assert Left.in_folder(tmp_path).folders == {*names, "hpc_ckpt_1.ckpt"}
