"""A training that saves `last.ckpt` every other step, in which a rank is killed, or a disk is full, during a save."""

import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.target import Point
from tests.harness import models
from tests.harness.training import Layout, Outcome, OutcomeCallback
from tests.strategy.checkpoints.saving_runs import Scored, fit, trainer_for

STEPS = 8
SAVER = "lightning_hanayo.strategy.checkpoints.save.Saver"


@dataclass
class Killed:
    """At which point of which save a rank kills itself."""

    point: Point
    rank: int
    save: int = 2
    _count: int = 0

    def __call__(self, point: Point) -> None:
        self._count += point == Point.BEGUN
        if (self._count, point, int(os.environ["RANK"])) == (self.save, self.point, self.rank):
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    layout: Layout,
    folder: Path,
    *,
    start: Path | None = None,
    at: Callable[[Point], object] | None = None,
    every: int = 2,
    **options: Any,
) -> Outcome:
    """Train on one rank, from the start or from a checkpoint, and save `last.ckpt` again and again."""
    warnings.filterwarnings("ignore", message=".*exists and is not empty|.*is not resumable|.*dirpath has changed")
    saving, outcome = (
        ModelCheckpoint(folder, save_top_k=0, save_last=True, every_n_train_steps=every),
        OutcomeCallback(),
    )
    with patch(SAVER, partial(Saver, at=at)) if at is not None else patch(SAVER, Saver):
        trainer = trainer_for(layout, [saving, outcome], max_epochs=-1, max_steps=STEPS, strategy=options)
        fit(trainer, models.build(Scored), layout, start)
    return outcome.outcome


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Inside it, TMPDIR is this folder."""
    with patch.dict(os.environ, TMPDIR=str(folder)), patch.object(tempfile, "tempdir", None):
        yield


def train_until_synced(layout: Layout, folder: Path, name: str, **options: Any) -> Outcome:
    """Train until rank 0 is to sync a file with this in its name for the second time; there it is killed."""
    fsync, count = os.fsync, 0

    def killing(descriptor: int) -> None:
        nonlocal count
        count += name in os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        if count == 2 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    with patch.object(os, "fsync", killing):
        return train(layout, folder, **options)


def train_for(seconds: float, layout: Layout, folder: Path, killed: int) -> Outcome:
    """Save after each step, and kill a rank so many seconds after its first save."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True

    def start_timer(point: Point) -> None:
        if point == Point.CLEANED and os.environ["RANK"] == str(killed) and timer.ident is None:
            timer.start()

    return train(layout, folder, at=start_timer, every=1)
