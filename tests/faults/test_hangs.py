"""A rank that hangs is named, with its line, by the lowest rank; here it goes on once all ranks have heard that.

rank 2    time.sleep(3600) in its hook
rank 0    no rank has made progress for 0.3 s: asks all, reports:
          "rank 2 (pipeline 2) waits for nobody: it is in on_train_batch_start, model.py:31: time.sleep(3600)"
"""

import io
import os
import time
from contextlib import redirect_stderr
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.strategy import hangs
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout

WIDTH = 4
LIMITS = hangs.Limits(first=0.3, again=600.0, look=0.05)


@dataclass
class Hang:
    """Where one rank hangs, once."""

    site: str
    rank: int
    is_over: bool = False

    def at(self, site: str, trainer: Trainer) -> None:
        """Hang here, if this is the place, until this rank has heard that it holds up others."""
        if site == self.site and int(os.environ["RANK"]) == self.rank and not self.is_over:
            failures: Any = trainer.strategy.failures  # type: ignore[attr-defined]
            while " in at, " not in str(failures.held_up_by):
                time.sleep(0.01)
            self.is_over = True


class Model(LightningModule):
    def __init__(self, hang: Hang) -> None:
        super().__init__()
        self.blocks, self.hang = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8)), hang

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.hang.at("step", self.trainer)
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.hang.at("validation", self.trainer)
        self.loss(batch)

    def setup(self, stage: str) -> None:
        self.hang.at("setup", self.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.hang.at("hook", self.trainer)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.hang.at("save", self.trainer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass
class Vectors(Dataset[Tensor]):
    hang: Hang
    trainer: Trainer

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index == 4:
            self.hang.at("loader", self.trainer)
        return torch.full((WIDTH,), float(index))


def train(layout: Layout, hang: Hang, folder: Path) -> str:
    """What this rank prints as errors."""
    strategy = HanayoStrategy(layout.pipe, 1, layout.cube, layout.data, 4)
    with patch.object(hangs, "LIMITS", LIMITS), redirect_stderr(io.StringIO()) as printed:
        trainer = Trainer(
            accelerator="cpu", devices=layout.world_size, strategy=strategy, max_epochs=1, logger=False,
            default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )  # fmt: skip
        loaders = [DataLoader(Vectors(hang, trainer), batch_size=4) for _ in range(2)]
        trainer.fit(Model(hang), *loaders)
    return printed.getvalue()


def report_of(pool: Pool, layout: Layout, hang: Hang, folder: Path) -> str:
    """What was reported of the hang. No rank has failed."""
    printed = pool.run(layout.world_size, train, layout, hang, folder, timeout=30.0)
    reports = "".join(printed).split("No progress for ")
    return next(one for one in reports if " in at, " in one)


PIPE, MIXED, CUBE = Layout(4), Layout(2, data=2), Layout(2, cube=(1, 2, 1))
CASES = [
    (PIPE, Hang("hook", 2)),
    (MIXED, Hang("step", 2)),
    pytest.param(CUBE, Hang("validation", 1), marks=pytest.mark.thorough),
    *(pytest.param(PIPE, Hang("hook", rank), marks=pytest.mark.thorough) for rank in (0, 1, 3)),
    *(pytest.param(MIXED, Hang("hook", rank), marks=pytest.mark.thorough) for rank in range(4)),
    *(pytest.param(CUBE, Hang("hook", rank), marks=pytest.mark.thorough) for rank in range(4)),
    *(
        pytest.param(layout, Hang(site, rank), marks=pytest.mark.thorough)
        for layout, rank in ((PIPE, 0), (PIPE, 3), (MIXED, 2), (CUBE, 1))
        for site in ("setup", "step", "validation", "loader", "save")
        if rank in (0, 2) or site not in ("step", "validation", "loader") or (layout is CUBE and site != "loader")
        if (layout, site) not in ((MIXED, "step"), (CUBE, "validation"))
    ),
]


@pytest.mark.parametrize(("layout", "hang"), CASES, ids=str)
def test_the_rank_that_hangs_is_named_with_its_line(pool: Pool, tmp_path: Path, layout: Layout, hang: Hang) -> None:
    report = report_of(pool, layout, hang, tmp_path)
    place = layout.topology.place(hang.rank)
    line = Hang.at.__code__.co_firstlineno + 5
    named = next(one for one in report.splitlines() if " in at, " in one)
    assert named.startswith(f"  rank {hang.rank} ({place}) waits for nobody: it is ")
    assert f"tests/faults/test_hangs.py:{line}: time.sleep(0.01)\n" in report
    waiting = [one for one in range(layout.world_size) if one != hang.rank]
    assert all(f"rank {one} " in report or "ranks " in report for one in waiting)
    assert "The run goes on. A rank that has waited for 0:30:00 (timeout) ends it." in report


class SavesAlone(Model):
    """A mistake: only rank 0 saves a checkpoint, and so enters collectives to which no other rank comes."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0 and batch_idx == 0:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "alone.ckpt")


def train_until_killed(layout: Layout, model: type[Model], hang: Hang, folder: Path, timeout: float) -> None:
    """Train with a time-out; the error reaches the script."""
    strategy = HanayoStrategy(layout.pipe, 1, layout.cube, layout.data, 4, timeout=timedelta(seconds=timeout))
    with patch.object(hangs, "LIMITS", LIMITS):
        trainer = Trainer(
            accelerator="cpu", devices=layout.world_size, strategy=strategy, max_epochs=1, logger=False,
            default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            use_distributed_sampler=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(model(hang), *(DataLoader(Vectors(hang, trainer), batch_size=4) for _ in range(2)))


NOWHERE = Hang("nowhere", 0)


@pytest.mark.thorough  # for half a minute it mainly waits; test_watch tells the same of one rank
@pytest.mark.parametrize("layout", [Layout(2), Layout(4), CUBE], ids=str)
def test_ranks_that_can_never_go_on_end_at_once(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    with pytest.raises(RunFailed) as failed:
        pool.run(layout.world_size, train_until_killed, layout, SavesAlone, NOWHERE, tmp_path, 1800.0, timeout=60.0)
    assert "timed out" not in {one.kind for one in failed.value.failures}
    printed = "".join(one.output for one in failed.value.failures)
    assert "The run ends, since ranks 0 and " in printed
    assert "can never go on" in printed


class Sleeps(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == self.hang.rank:
            time.sleep(3600)


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_at_the_time_out_the_rank_that_hangs_is_named(pool: Pool, tmp_path: Path, rank: int) -> None:
    layout, hang = Layout(4), Hang("sleep", rank)
    with pytest.raises(RunFailed) as failed:
        pool.run(4, train_until_killed, layout, Sleeps, hang, tmp_path, 8.0, timeout=60.0)
    assert "timed out" not in {one.kind for one in failed.value.failures}
    causes = {one.message for one in failed.value.failures if one.kind == "PeerFailed"}
    assert len(causes) == 1
    assert f"rank {rank} (pipeline {rank}) waits for nobody: it is in on_train_batch_start, " in causes.pop()
