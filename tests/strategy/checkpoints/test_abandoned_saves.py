"""A run fails while a checkpoint is written in the background, which is completed soon, or given up."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.target import Point
from lightning_hanayo.errors import PeerFailed
from tests.faults.saving_script import SAVER
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout
from tests.strategy.checkpoints.saving_runs import Scored, fit, step_of, trainer_for

PIPE = Layout(2)


class Failing(Scored):
    """Its third step fails, which runs on pipeline rank 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            raise ZeroDivisionError("in the user's step")
        return super().training_step(batch, batch_idx)


class Slow(Saver):
    """Rank 1 writes its second checkpoint until it is given up."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, at=self._look, **options)
        self._saves = 0

    def _look(self, point: Point) -> None:
        self._saves += point == Point.BEGUN
        if (self._saves, point, os.environ["RANK"]) == (2, Point.FOLDER_MADE, "1"):
            assert self._is_abandoned.wait(60)


def fail(folder: Path, saver: type[Saver]) -> str:
    """Save after each step until the error, whose class is returned."""
    with patch(SAVER, saver):
        saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = trainer_for(PIPE, [saving], strategy={"save_async": True})
        try:
            fit(trainer, models.build(Failing), PIPE)
        except (ZeroDivisionError, PeerFailed) as error:
            return type(error).__name__
    raise AssertionError("no error")


@pytest.mark.thorough
@pytest.mark.parametrize("saver", [Saver, Slow])
def test_the_run_ends_with_its_own_error_and_whole_checkpoints(pool: Pool, tmp_path: Path, saver: type[Saver]) -> None:
    """The pool also finds that no thread is left."""
    assert sorted(pool.run(2, fail, tmp_path, saver)) == ["PeerFailed", "ZeroDivisionError"]
    left = sorted(os.listdir(tmp_path))
    assert left in ([["step=1.ckpt"]] if saver is Slow else [["step=1.ckpt"], ["step=1.ckpt", "step=2.ckpt"]])
    assert [step_of(tmp_path / name) for name in left] == [1, 2][: len(left)]
