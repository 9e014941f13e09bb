"""A run that fails saves a checkpoint if all ranks have stopped at the same step; else it ends with its cause, soon.

rank 0    error in a hook, step 3          saves its part     all ranks alike: the checkpoint is whole
rank 1    error in a hook, step 3          saves its part

rank 0    waits for rank 1                 PeerFailed         one rank alone: no checkpoint
rank 1    error in a hook, step 3          the error
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

from lightning_hanayo.strategy import failure
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout
from tests.strategy.checkpoints.saving_runs import Scored, fit, step_of, trainer_for

PIPE, DATA, CUBE = Layout(2), Layout(1, data=2), Layout(1, cube=(1, 2, 1))


class Fails(Callback):
    """Raises at the start of the batch after step 3, on some ranks."""

    def __init__(self, error: BaseException, ranks: set[int]) -> None:
        self.error, self.ranks = error, ranks

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank in self.ranks:
            raise self.error


class SavesByHand(Callback):
    """Saves from a hook of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / "by hand.ckpt")


def fail(layout: Layout, folder: Path, kind: str, error: BaseException, ranks: set[int]) -> None:
    """Train until an error is raised on some ranks."""
    warnings.filterwarnings("ignore", message=".*was called without a model|.*no last checkpoint available")
    saves: dict[str, Callback] = {
        "ModelCheckpoint": ModelCheckpoint(folder, "{step}", every_n_epochs=0, save_on_exception=True, save_last=True),
        "OnExceptionCheckpoint": OnExceptionCheckpoint(folder),
        "by hand": SavesByHand(folder),
    }
    options = {"max_steps": 4, "enable_checkpointing": kind != "by hand"}
    strategy = {"save_async": kind == "OnExceptionCheckpoint"}
    trainer = trainer_for(layout, [saves[kind], Fails(error, ranks)], strategy=strategy, **options)
    failure.GRACE /= 5  # how long ranks wait for each other; the next test has the usual time again
    fit(trainer, models.build(Scored), layout)


def resume(layout: Layout, start: Path) -> int:
    """Go on to the end of the training."""
    warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint|.*not resumable")
    trainer = trainer_for(layout, [], enable_checkpointing=False)
    fit(trainer, models.build(Scored), layout, start)
    return int(trainer.global_step)


@pytest.mark.parametrize(
    ("kind", "layout", "names"),
    [
        ("ModelCheckpoint", PIPE, ["last.ckpt", "step=3.ckpt"]),
        pytest.param("ModelCheckpoint", CUBE, ["last.ckpt", "step=3.ckpt"], marks=pytest.mark.thorough),
        pytest.param("OnExceptionCheckpoint", DATA, ["on_exception.ckpt"], marks=pytest.mark.thorough),
        pytest.param("by hand", PIPE, ["by hand.ckpt"], marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_an_error_on_all_ranks_saves(pool: Pool, tmp_path: Path, kind: str, layout: Layout, names: list[str]) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(layout.world_size, fail, layout, tmp_path, kind, KeyError("planned"), {0, 1})
    assert caught.value.first.message == "'planned'"
    assert {path.name: step_of(path) for path in tmp_path.iterdir()} == dict.fromkeys(names, 3)
    assert pool.run(layout.world_size, resume, layout, tmp_path / names[0]) == [8, 8]


@pytest.mark.thorough
def test_ctrl_c_on_all_ranks_saves(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(2, fail, PIPE, tmp_path, "ModelCheckpoint", KeyboardInterrupt(), {0, 1})
    assert {one.kind for one in caught.value.failures} <= {"SystemExit", "PeerFailed"}
    assert {path.name: step_of(path) for path in tmp_path.iterdir()} == {"last.ckpt": 3, "step=3.ckpt": 3}


@pytest.mark.parametrize(
    ("kind", "layout", "rank"),
    [
        ("ModelCheckpoint", PIPE, 1),
        pytest.param("ModelCheckpoint", PIPE, 0, marks=pytest.mark.thorough),
        pytest.param("OnExceptionCheckpoint", DATA, 0, marks=pytest.mark.thorough),
        pytest.param("by hand", CUBE, 1, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_an_error_on_one_rank_saves_no_checkpoint(
    pool: Pool, tmp_path: Path, kind: str, layout: Layout, rank: int
) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(layout.world_size, fail, layout, tmp_path, kind, KeyError("planned"), {rank})
    kinds = {one.rank: one.kind for one in caught.value.failures}
    cause = caught.value.first
    assert kinds == {rank: "KeyError", 1 - rank: "PeerFailed"}
    assert "KeyError: 'planned'" in cause.trace
    assert f"rank {1 - rank} (pipeline" in cause.output and "has not stopped with an error" in cause.output
    assert not list(tmp_path.iterdir())
