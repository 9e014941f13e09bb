"""Saves and removes the checkpoints of one run: folders in which each rank writes its part, or single files.

one rank, save_full=True, weights only    rank 0 has the whole checkpoint, and writes it into one file
several ranks                             each writes what it holds, into a folder

Finds before training what would make every save fail: folders that can't be written, values that can't be stored.

All ranks look, and raise one error, so that nobody trains for hours and then can't save.

Hyperparameters that a folder can't hold, since they can't be stored without pickle: they are left out, and named.

Lets `ModelCheckpoint` find out which names are taken while a checkpoint is written in the background.

same.ckpt       being written: it gets its name when it is whole
same.ckpt?      Lightning asks: waits for it, then it is taken, so same-v1.ckpt. The save that follows would wait, too
"""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import fspath
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_hanayo.dist_checkpointing.commit import RankPart, SavingRanks
from lightning_hanayo.dist_checkpointing.plain_file import write_file
from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.state import encode
from lightning_hanayo.dist_checkpointing.target import Storage
from lightning_hanayo.dist_checkpointing.tensor_file import dtype_name
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.strategy.checkpoints.parts import with_distributed_marked
from lightning_hanayo.strategy.checkpoints.resume import KEY, ResumeState, gathered
from lightning_hanayo.strategy.joining import on_all_ranks
from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.topology import AXES, Topology


class Checkpoints:
    """Those of one run. All ranks of the world call each method alike.

    Args:
        run: of the Trainer.
        io: the user's way to write files; Lightning's own is replaced.
    """

    def __init__(self, run: Run, io: CheckpointIO) -> None:
        options, several = run.options, run.topology.world_size > 1
        self.is_sharded = several and not options.save_full
        """whether a checkpoint is a folder"""
        self._rank = run.rank
        self._io = io
        self._uses_own_files = type(io) is TorchCheckpointIO  # else a plugin of the user's writes and removes files
        world, factory = run.topology.groups(*AXES), run.groups.factory
        self._peers = SavingRanks(factory.control(world) if several else None)
        self.newest: str | None = None
        """the path of the last one that was saved; in the background of the one before, which is there for certain"""
        self._begun: str | None = None
        self.in_background = options.save_async and self.is_sharded
        self._saver = Saver(self._peers, SavingRanks(factory.background(world)) if self.in_background else None)
        self.poll, self.wait = self._saver.poll, self._saver.wait
        self.finish, self.abandon = self._saver.finish, self._saver.abandon
        for callback in callbacks_of(run.trainer) if self.in_background else ():
            if isinstance(callback, ModelCheckpoint):  # a name is looked for once the save in flight has ended
                run.attributes.before(callback, "file_exists", self.wait)

    @contextmanager
    def one_file(self) -> Iterator[None]:
        """Inside it, rank 0 gathers what is saved: weights alone, for tools that read files of `torch.save`."""
        before, self.is_sharded = self.is_sharded, False
        try:
            yield
        finally:
            self.is_sharded = before

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        own_part: Callable[[Mapping[str, Any]], RankPart] | None,
        resume: ResumeState | None,
        storage_options: Any = None,
    ) -> None:
        """Save Lightning's checkpoint. In the background it may be complete only after this has returned.

        Args:
            checkpoint: as hooks have left it.
            path: of the folder or file.
            own_part: returns this rank's part of the folder; None if the module is whole on each rank, as before the
                run.
            resume: what this rank adds for a run that goes on from the checkpoint; None for weights alone.
            storage_options: for a plugin of the user's.

        Raises:
            CheckpointError: it wasn't saved; on all ranks alike.
            UnsupportedError: something in it can't be stored; on all ranks alike.
        """
        if self._uses_own_files and storage_options is not None:
            raise TypeError("storage_options are for a CheckpointIO plugin, and this Trainer has none")
        if self.is_sharded and own_part is not None:
            self._saver.save(fspath(path), own_part(_without_unstorable(checkpoint)))
            self.newest, self._begun = (self._begun if self.in_background else fspath(path)), fspath(path)
            return
        if resume is not None:
            # hooks may have kept the dictionary that they were given
            checkpoint = {**checkpoint, KEY: gathered(resume, self._peers.gather)}

        def write() -> None:
            if self._rank == 0 and self._uses_own_files:
                write_file(fspath(path), partial(torch.save, checkpoint))
            elif self._rank == 0:
                self._io.save_checkpoint(checkpoint, fspath(path), storage_options=storage_options)

        on_all_ranks(write)
        self.newest = fspath(path)

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint, after the save in flight."""
        self.newest = None if self.newest == fspath(path) else self.newest
        if self._uses_own_files:
            self._saver.remove(fspath(path))
        elif self._rank == 0:
            self._io.remove_checkpoint(path)


_ONE_FILE = "or save one file: HanayoStrategy(save_full=True)."
_Savers = Sequence[ModelCheckpoint | OnExceptionCheckpoint]


def check_saving(trainer: "pl.Trainer", module: "pl.LightningModule", checkpoints: Checkpoints) -> None:
    """Check that the run's callbacks will be able to save. Called by all ranks, after `setup` hooks.

    Raises:
        UnsupportedError: on all ranks alike.
    """
    savers = [one for one in callbacks_of(trainer) if isinstance(one, ModelCheckpoint | OnExceptionCheckpoint)]
    if not savers or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    if _saves_folders(checkpoints, savers) and trainer.is_global_zero:
        for owner in (module, trainer.datamodule):  # type: ignore[attr-defined]
            if owner is not None:
                _warn_of_unstorable(owner.hparams, type(owner).__name__)
    on_all_ranks(lambda: _check_this_rank(trainer, module, checkpoints, savers))


def _saves_folders(checkpoints: Checkpoints, savers: _Savers) -> bool:
    """Weights alone are saved in files."""
    return checkpoints.is_sharded and not all(getattr(one, "save_weights_only", False) for one in savers)


def check_plugin(options: Options, topology: Topology, io: CheckpointIO) -> None:
    """Refuse a plugin that writes files, where checkpoints are folders. Needs no process group.

    Raises:
        UnsupportedError: there is one.
    """
    if topology.world_size > 1 and not options.save_full and type(io) is not TorchCheckpointIO:
        name = type(io).__name__
        hint = "To write while training goes on: HanayoStrategy(save_async=True). " if "Async" in name else ""
        raise UnsupportedError(
            f"{name} writes what rank 0 holds, but each of several ranks writes its own part of a checkpoint. {hint}"
            f"Leave the plugin out, or let rank 0 gather all: HanayoStrategy(save_full=True)."
        )


def _check_this_rank(
    trainer: "pl.Trainer", module: "pl.LightningModule", checkpoints: Checkpoints, savers: _Savers
) -> None:
    is_sharded = _saves_folders(checkpoints, savers)
    links = [one for one in savers if isinstance(one, ModelCheckpoint) and one.save_last == "link"]
    if links and is_sharded and checkpoints.in_background:
        raise UnsupportedError(
            "ModelCheckpoint(save_last='link') links to a checkpoint as soon as it is saved, but with save_async=True "
            "it isn't complete then. Set save_last=True, or leave out save_async."
        )
    for name, parameter in module.named_parameters() if is_sharded else ():
        if not parameter.is_meta:
            dtype_name(parameter, name)  # raises if it can't be stored
    for callback in callbacks_of(trainer) if is_sharded and trainer.is_global_zero else ():
        try:
            state = callback.state_dict()
        except Exception:  # it may need what training makes
            continue
        try:
            encode(with_distributed_marked(state), f"the state_dict() of {type(callback).__name__}")
        except HanayoError as error:
            raise UnsupportedError(f"{error} Store plain values there, {_ONE_FILE}") from error
    if is_sharded or trainer.is_global_zero:
        for folder in {os.fspath(one.dirpath): None for one in savers if one.dirpath is not None}:
            _check_writable(folder, trainer.global_rank)


def _check_writable(folder: str, rank: int) -> None:
    """Make and remove a file, in the folder or in the nearest one above it that there is."""
    storage = Storage(folder)
    if storage.is_local:
        path = Path(os.path.abspath(storage.path))
        storage = Storage(next(one for one in (path, *path.parents) if os.path.lexists(one)))
    name = f".hanayo-{secrets.token_hex(4)}"
    try:
        with storage.create(name):
            pass
        storage.remove(name)
    except OSError as error:
        raise UnsupportedError(
            f"ModelCheckpoint: rank {rank} can't write to {folder} ({error.strerror or error}). Set dirpath to a "
            f"folder that all ranks can write to."
        ) from error


_KEYS = (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY)
"""where a checkpoint has them"""
_TYPES = (LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE, LightningDataModule.CHECKPOINT_HYPER_PARAMS_TYPE)
"""where it has the class of OmegaConf's containers, which come back as dicts"""


def _unstorable(values: Mapping[str, Any]) -> dict[str, str]:
    """The hyperparameters that can't be stored: their classes by name."""
    found = {}
    for name, value in values.items():
        try:
            encode(value, name)
        except HanayoError:
            found[name] = type(value).__name__
    return found


def _without_unstorable(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint without the hyperparameters that can't be stored."""
    kept = {key: value for key, value in checkpoint.items() if key not in _TYPES}
    for key in _KEYS:
        if isinstance(kept.get(key), Mapping):
            left_out = _unstorable(kept[key])
            kept[key] = {name: value for name, value in kept[key].items() if name not in left_out}
    return kept


def _warn_of_unstorable(values: Mapping[str, Any], owner: str) -> None:
    """Name the hyperparameters that checkpoints will not hold."""
    left_out = _unstorable(values)
    if left_out:
        listed = ", ".join(f"{name} ({kind})" for name, kind in left_out.items())
        arguments = ", ".join(f"{name}=..." for name in left_out)
        rank_zero_warn(
            f"Checkpoints will not hold these hyperparameters of {owner}, as they can't be stored without pickle: "
            f"{listed}. Give them when you load one, load_from_checkpoint(path, {arguments}), or leave them out: "
            f"save_hyperparameters(ignore={[*left_out]})."
        )


def ends_job(path: str | os.PathLike[str]) -> bool:
    """Whether it is the checkpoint after which Lightning lets SLURM end this job at once, and start it again."""
    return os.path.basename(path).startswith("hpc_ckpt_")
