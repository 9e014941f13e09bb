"""One run of `fit` that may be started again: remembers what it saves, and resumes from there.

1st start   saves version_0/checkpoints/last.ckpt, step 40; a rank is killed, so torchrun starts all ranks again
2nd start   the same script: fit(ckpt_path=None) resumes from version_0/checkpoints/last.ckpt
"""

import itertools
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_hanayo.checkpoint.found import Found
from lightning_hanayo.errors import CheckpointError
from lightning_hanayo.strategy.checkpoints.resume_storage import saved_run
from lightning_hanayo.strategy.groups.on_all_ranks import on_all_ranks
from lightning_hanayo.strategy.lightning.loops.start_from import Load, load_instead, loaded, was_in_epoch
from lightning_hanayo.strategy.restarts.launch import Launch, is_requeued, is_restarted, this_launch
from lightning_hanayo.strategy.restarts.record import Record, absolute, record_path
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes
from lightning_hanayo.topology import Topology

_fits = itertools.count()
"""Numbers the runs of `fit` of this process: a script may have several, and runs all of them again."""


class Restarts:
    """One run's side of it. All ranks call each method alike; rank 0 writes the record."""

    def __init__(self, rank: int, path: str, record: Record, fit: int) -> None:
        self._rank = rank
        self._path = path
        self._record = record
        self._fit = fit

    @staticmethod
    def begin(
        trainer: "pl.Trainer", topology: Topology, rank: int, attributes: TemporaryAttributes
    ) -> "Restarts | None":
        """Let a restarted run of `fit` go on from its newest checkpoint.

        Returns:
            None if nobody starts this run again.

        Raises:
            CheckpointError: not all nodes see the files of the run.
        """
        launch = this_launch() if trainer.state.fn == TrainerFn.FITTING else None
        if launch is None:
            return None
        path = record_path(trainer.default_root_dir, launch.key)
        record, is_restart = _agreed_record(launch, absolute(path))
        restarts = Restarts(rank, absolute(path), record, next(_fits))
        if is_restart:
            restarts._resume(trainer, topology, attributes)
        return restarts

    def note(self, path: str | Path) -> None:
        """Remember a checkpoint before it is saved: a save in the background ends when it ends."""
        saved = self._record.saved.setdefault(str(self._fit), [])
        if absolute(path) not in saved:
            saved.append(absolute(path))
            self._write()

    def forget(self, path: str | Path) -> None:
        """Called when a checkpoint is removed."""
        saved = self._record.saved.get(str(self._fit), [])
        if absolute(path) in saved:
            saved.remove(absolute(path))
            self._write()

    def _write(self) -> None:
        if self._rank == 0:
            self._record.write(self._path)

    def _resume(self, trainer: "pl.Trainer", topology: Topology, attributes: TemporaryAttributes) -> None:
        self._write()  # who has started it now may start it again
        whole, broken = on_all_ranks(lambda: self._record.checkpoints_of(self._fit) if self._rank == 0 else ([], []))[0]
        for one in broken:
            rank_zero_warn(f"Restart: {one.path} is skipped, it isn't whole: {one.problem}")

        def load(original: Load, given: Any, weights_only: bool | None) -> None:
            if not _load_newest(trainer, topology, original, whole):
                start = f"the given checkpoint, {given}" if given else "its beginning"
                rank_zero_info(f"Restart: the run has saved no checkpoint so far, and starts from {start}")
                original(given, weights_only)

        load_instead(trainer, attributes, load)


def _agreed_record(launch: Launch, path: str) -> tuple[Record, bool]:
    """What is known of the run, and whether it has started before; the same on all ranks."""
    requeued = is_requeued(os.environ)
    found = on_all_ranks(lambda: (launch.starters, Record.read(path), is_restarted(os.environ), time.time()))
    starters = sorted({one for own, *_ in found for one in own})
    again = {one for one in starters if requeued or not one.startswith("slurm-")}
    records = [one if one is not None and again & set(one.starters) else None for _, one, *_ in found]
    first = next((rank for rank, one in enumerate(records) if one is not None), None)
    if first is None:
        return Record(found[0][3], starters), any(restarted for *_, restarted, _ in found)
    record = records[0]
    if record is None:
        raise CheckpointError(
            f"rank {first} finds {path}, which says what this run has saved before its restart; rank 0 doesn't. Set "
            f"default_root_dir of the Trainer to a folder that all nodes share."
        )
    record.starters = sorted({*record.starters, *starters})
    return record, True


def _load_newest(trainer: "pl.Trainer", topology: Topology, original: Load, checkpoints: list[Found]) -> bool:
    """Load the newest checkpoint that can be resumed here; returns whether there is one."""
    for number, one in enumerate(checkpoints):
        try:
            original(one.path, None)
        except (CheckpointError, FileNotFoundError) as error:
            rank_zero_warn(f"Restart: {one.path} is skipped: {error}")
            continue
        if number + 1 < len(checkpoints) and not _continues(loaded(trainer), topology):
            rank_zero_warn(
                f"Restart: {one.path} is skipped: it was saved in the middle of an epoch with another number of data "
                f"ranks, and the loader's state there belongs to those."
            )
            continue
        rank_zero_info(f"Restart: the run resumes from {one.path}, saved after step {one.step}")
        return True
    return False


def _continues(checkpoint: Any, topology: Topology) -> bool:
    """Whether a run on this number of data ranks can go on where the checkpoint was saved."""
    saved = saved_run(checkpoint)
    if saved is None or saved.topology.data == topology.data or not was_in_epoch(checkpoint):
        return True
    return not saved.loader_states(0)
