"""Restarts: a run that torchrun or SLURM starts again goes on from its newest checkpoint.

1st start   saves version_0/checkpoints/last.ckpt, step 40; a rank is killed, so torchrun starts all ranks again
2nd start   the same script: fit(ckpt_path=None) resumes from version_0/checkpoints/last.ckpt

A small file, <default_root_dir>/.hanayo/<key>.json, says which checkpoints a run has saved: a restart gets other
folders from its loggers, and a folder may hold checkpoints of other runs. It also says who has started the run:

                                  key of the run        starter
torchrun, first start             torchrun-<run id>     the agent on this node
torchrun, after a failure         the same              the same agent, or another node's that was there before
torchrun, given a second time     maybe the same        another agent: this is a new run
SLURM, first start                slurm-<job>-<step>    nobody who could have started it before
SLURM, the job is requeued        the same              the job's step, with the same command
"""

import itertools
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_hanayo.dist_checkpointing.folder import Found, look_at
from lightning_hanayo.dist_checkpointing.plain_file import write_file
from lightning_hanayo.dist_checkpointing.target import Storage
from lightning_hanayo.errors import CheckpointError
from lightning_hanayo.monitor import processes
from lightning_hanayo.strategy.checkpoints.resume import saved_run
from lightning_hanayo.strategy.joining import on_all_ranks
from lightning_hanayo.strategy.lightning.loops import Load, load_instead, loaded, was_in_epoch
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.topology import Topology


def write_error_file(error: BaseException) -> None:
    """Write why this rank fails to the file that torchrun's agent reads and shows, if there is an agent.

    Called while the error is handled. A rank that ends because of another one names that one's cause: torchrun shows
    the first text that it has seen.
    """
    with suppress(OSError):  # the agent may have removed the folder; the error itself is shown anyway
        get_error_handler().record_exception(error)


_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Launch:
    """One start of this process.

    Args:
        key: names the run, the same in all its starts; a file name.
        starters: who may start the run again, each by a text that nobody else has.
    """

    key: str
    starters: tuple[str, ...]


def launch_from(environment: Mapping[str, str], command: str) -> Launch | None:
    """The start that the variables of torchrun and SLURM describe.

    Example:
        >>> launch_from({"SLURM_PROCID": "0", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}, "train.py").key
        'slurm-17-0'
    """
    starters, key = [], None
    if "SLURM_PROCID" in environment and "SLURM_JOB_ID" in environment:
        key = f"slurm-{environment['SLURM_JOB_ID']}-{environment.get('SLURM_STEP_ID', '0')}"
        starters.append(f"{key} {command}")
    if "TORCHELASTIC_RUN_ID" in environment:
        key = f"torchrun-{environment['TORCHELASTIC_RUN_ID']}"
        starters.append(_agent(environment))
    return None if key is None else Launch(_NOT_IN_NAMES.sub("_", key), tuple(starters))


def is_requeued(environment: Mapping[str, str]) -> bool:
    """Whether SLURM has started this job before."""
    return environment.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def is_restarted(environment: Mapping[str, str]) -> bool:
    """Whether this start is counted as a restart: torchrun doesn't count those after which more nodes take part."""
    return is_requeued(environment) or environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _agent(environment: Mapping[str, str]) -> str:
    """torchrun's process on this node: the folder of its logs is its own, else the process that has started this one.

    The folder is above attempt_<number>/<local rank>/error.json.
    """
    parents, pid = Path(environment.get("TORCHELASTIC_ERROR_FILE", "")).parents, os.getppid()
    own = parents[2] if len(parents) > 3 else f"{pid} {processes.started(pid)}"
    return f"{os.uname().nodename} {own}"


@dataclass
class Record:
    """The file that a run keeps from start to start."""

    started: float
    """when the run started for the first time, in seconds since 1970"""
    starters: list[str]
    """who has started it so far"""
    saved: dict[str, list[str]] = field(default_factory=dict)
    """where each `fit` of the script has saved a checkpoint, by its number"""

    @staticmethod
    def read(path: str) -> "Record | None":
        """The content of the file; None without one, or if it isn't whole."""
        folder, _, name = path.rpartition("/")
        try:
            return Record(**json.loads(bytes(Storage(folder).read(name))))
        except (OSError, TypeError, ValueError):
            return None

    def write(self, path: str) -> None:
        """Replace the file at once. One rank calls it."""
        content = json.dumps(asdict(self)).encode()
        write_file(path, lambda file: file.write(content))

    def checkpoints_of(self, fit: int) -> tuple[list[Found], list[Found]]:
        """The whole checkpoints of one `fit`, the newest first; and those that aren't whole.

        A checkpoint that was there before the run has started isn't its own: the save to that path was interrupted.
        """
        found = [one for one in map(look_at, self.saved.get(str(fit), ())) if one is not None]
        own = [one for one in found if one.saved >= int(self.started)]
        whole = [one for one in own if one.kind in ("folder", "file")]
        broken = [one for one in found if one.kind in ("incomplete", "leftover")]
        return sorted(whole, key=lambda one: (one.step or 0, one.saved), reverse=True), broken


def record_path(root: str | os.PathLike[str], key: str) -> str:
    """Where the record of a run is: in the Trainer's default_root_dir."""
    return f"{os.fspath(root).rstrip('/')}/.hanayo/{key}.json"


def absolute(path: str | Path) -> str:
    """A local path from the root on; a URL as it is."""
    storage: Any = Storage(path)
    return os.path.abspath(storage.path) if storage.is_local else os.fspath(path)


_fits = itertools.count()
"""Numbers the runs of `fit` of this process: a script may have several, and runs all of them again."""


@dataclass(eq=False)
class Restarts:
    """The record of one run of `fit` that may be started again. All ranks call each method alike; rank 0 writes it."""

    rank: int
    path: str
    """of the record"""
    record: Record
    fit: int
    """the number of this `fit` among those of the script"""

    @staticmethod
    def begin(run: Run) -> "Restarts | None":
        """Let a restarted run of `fit` go on from its newest checkpoint.

        Returns:
            None if nobody starts this run again.

        Raises:
            CheckpointError: not all nodes see the files of the run.
        """
        trainer, fits = run.trainer, run.trainer.state.fn == TrainerFn.FITTING
        launch = launch_from(os.environ, " ".join(sys.argv)) if fits else None
        if launch is None:  # nobody starts this process again
            return None
        path = record_path(trainer.default_root_dir, launch.key)
        record, is_restart = _agreed_record(launch, absolute(path))
        restarts = Restarts(run.rank, absolute(path), record, next(_fits))
        if is_restart:
            restarts._resume(run)
        return restarts

    def note(self, path: str | Path) -> None:
        """Remember a checkpoint before it is saved: a save in the background ends when it ends."""
        saved = self.record.saved.setdefault(str(self.fit), [])
        if absolute(path) not in saved:
            saved.append(absolute(path))
            self._write()

    def forget(self, path: str | Path) -> None:
        """Called when a checkpoint is removed."""
        saved = self.record.saved.get(str(self.fit), [])
        if absolute(path) in saved:
            saved.remove(absolute(path))
            self._write()

    def _write(self) -> None:
        if self.rank == 0:
            self.record.write(self.path)

    def _resume(self, run: Run) -> None:
        trainer = run.trainer
        self._write()  # who has started it now may start it again
        whole, broken = on_all_ranks(lambda: self.record.checkpoints_of(self.fit) if self.rank == 0 else ([], []))[0]
        for one in broken:
            rank_zero_warn(f"Restart: {one.path} is skipped, it isn't whole: {one.problem}")

        def load(original: Load, given: Any = None, weights_only: bool | None = None) -> None:
            if not _load_newest(trainer, run.topology, original, whole):
                start = f"the given checkpoint, {given}" if given else "its beginning"
                rank_zero_info(f"Restart: the run has saved no checkpoint so far, and starts from {start}")
                original(given, weights_only)

        load_instead(trainer, run.attributes, load)


def _agreed_record(launch: Launch, path: str) -> tuple[Record, bool]:
    """The record of the run, and whether it has started before; the same on all ranks."""
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
        missing = f"rank {first} finds {path}, the record of this run before its restart; rank 0 doesn't"
        raise CheckpointError(f"{missing}. Set default_root_dir of the Trainer to a folder that all nodes share.")
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
        saved = saved_run(loaded(trainer))
        is_elsewhere = saved is not None and saved.topology.data != topology.data and was_in_epoch(loaded(trainer))
        if number + 1 < len(checkpoints) and saved is not None and is_elsewhere and saved.has_loader_states:
            reason = "saved in the middle of an epoch with another number of data ranks, whose loader state it has"
            rank_zero_warn(f"Restart: {one.path} is skipped: {reason}")
            continue
        step = loaded(trainer).get("global_step")
        rank_zero_info(f"Restart: the run resumes from {one.path}, saved after step {step}")
        return True
    return False
