"""Saves and removes the checkpoints of one run: folders in which each rank writes its part, or single files.

one rank, or save_full=True    rank 0 has the whole checkpoint, and writes it into one file
several ranks                  each writes what it holds, into a folder
"""

from functools import partial
from os import fspath
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from lightning_hanayo.checkpoint.save.peers import GroupPeers, NoPeers, Peers
from lightning_hanayo.checkpoint.save.plain_file import write_file
from lightning_hanayo.checkpoint.save.saver import Saver
from lightning_hanayo.strategy.checkpoints.resume import KEY, ResumeState
from lightning_hanayo.strategy.checkpoints.resume_storage import gathered
from lightning_hanayo.strategy.checkpoints.saving.collect import CutModel, rank_part
from lightning_hanayo.strategy.checkpoints.saving.hyperparameters import without_unstorable
from lightning_hanayo.strategy.checkpoints.saving.parts import Place
from lightning_hanayo.strategy.groups.on_all_ranks import on_all_ranks
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.process_groups import ProcessGroups
from lightning_hanayo.topology import Topology

_ALL = ("data", "pipe", "x", "y", "z")


class Checkpoints:
    """Those of one run. All ranks of the world call each method alike.

    Args:
        options: of the strategy.
        topology: of the ranks.
        rank: this one.
        groups: from which a group of all ranks is made.
        io: the user's way to write files; Lightning's own is replaced.
    """

    def __init__(
        self, options: Options, topology: Topology, rank: int, groups: ProcessGroups, io: CheckpointIO
    ) -> None:
        self.is_sharded = topology.world_size > 1 and not options.save_full
        """whether a checkpoint is a folder"""
        self._topology, self._rank = topology, rank
        self._io = io
        world, factory = topology.groups(*_ALL), groups.factory
        is_alone = topology.world_size == 1
        self._peers: Peers = NoPeers() if is_alone else GroupPeers(factory.control(world))
        self.newest: str | None = None
        """the path of the last one that was saved; in the background of the one before, which is there for certain"""
        self._begun: str | None = None
        self.in_background = options.save_async and self.is_sharded
        self._saver = Saver(self._peers, GroupPeers(factory.background(world)) if self.in_background else None)
        self.poll, self.wait = self._saver.poll, self._saver.wait
        self.finish, self.abandon = self._saver.finish, self._saver.abandon

    @property
    def uses_own_files(self) -> bool:
        """Whether files are written and removed here, not by a plugin of the user's."""
        return type(self._io) is TorchCheckpointIO

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        model: CutModel | None,
        resume: ResumeState | None,
        storage_options: Any = None,
    ) -> None:
        """Save Lightning's checkpoint. In the background it may be complete only after this has returned.

        Args:
            checkpoint: as hooks have left it.
            path: of the folder or file.
            model: None if the module is whole on each rank, as before the run.
            resume: what this rank adds for a run that goes on from the checkpoint; None for weights alone.
            storage_options: for a plugin of the user's.

        Raises:
            CheckpointError: it wasn't saved; on all ranks alike.
            UnsupportedError: something in it can't be stored; on all ranks alike.
        """
        if self.uses_own_files and storage_options is not None:
            raise TypeError("storage_options are for a CheckpointIO plugin, and this Trainer has none")
        if self.is_sharded and model is not None:
            place = Place(self._topology, self._rank, model.cube, model.shards)
            self._saver.save(fspath(path), rank_part(without_unstorable(checkpoint), model, place, resume))
            self.newest, self._begun = (self._begun if self.in_background else fspath(path)), fspath(path)
            return
        if resume is not None:
            state = gathered(resume, self._topology.coordinates(self._rank)[0], self._peers.gather)
            checkpoint = {**checkpoint, KEY: state}  # hooks may have kept the dictionary that they were given
        on_all_ranks(partial(self._write_file, checkpoint, fspath(path), storage_options))
        self.newest = fspath(path)

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint, after the save in flight."""
        self.newest = None if self.newest == fspath(path) else self.newest
        if self.uses_own_files:
            self._saver.remove(fspath(path))
        elif self._rank == 0:
            self._io.remove_checkpoint(path)

    def _write_file(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        if self._rank == 0 and self.uses_own_files:
            write_file(path, partial(torch.save, checkpoint))
        elif self._rank == 0:
            self._io.save_checkpoint(checkpoint, path, storage_options=storage_options)
