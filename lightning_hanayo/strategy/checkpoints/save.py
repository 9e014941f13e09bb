"""Finds before training what would make every save fail: folders that can't be written, values that can't be stored.

All ranks look, and raise one error, so that nobody trains for hours and then can't save.
"""

import os
import secrets
from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_hanayo.checkpoint.format.plain_values import encode
from lightning_hanayo.checkpoint.format.storage import Storage
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.packed_values import is_tensor_subclass
from lightning_hanayo.strategy.checkpoints.saving.distributed_tensors import with_distributed_marked
from lightning_hanayo.strategy.checkpoints.saving.hyperparameters import warn_of_unstorable
from lightning_hanayo.strategy.checkpoints.saving.save import Checkpoints
from lightning_hanayo.strategy.groups.on_all_ranks import on_all_ranks
from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.topology import Topology

_ONE_FILE = "or save one file: HanayoStrategy(save_full=True)."


def check_saving(trainer: "pl.Trainer", module: "pl.LightningModule", checkpoints: Checkpoints) -> None:
    """Check that the run's callbacks will be able to save. Called by all ranks, after `setup` hooks.

    Raises:
        UnsupportedError: on all ranks alike.
    """
    savers = [one for one in callbacks_of(trainer) if isinstance(one, ModelCheckpoint | OnExceptionCheckpoint)]
    if not savers or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    if checkpoints.is_sharded and trainer.is_global_zero:
        warn_of_unstorable(module.hparams, type(module).__name__)
        datamodule: pl.LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
        if datamodule is not None:
            warn_of_unstorable(datamodule.hparams, type(datamodule).__name__)
    on_all_ranks(lambda: _check_this_rank(trainer, module, checkpoints, savers))


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
    trainer: "pl.Trainer",
    module: "pl.LightningModule",
    checkpoints: Checkpoints,
    savers: Sequence[ModelCheckpoint | OnExceptionCheckpoint],
) -> None:
    if checkpoints.is_sharded:
        _check_links(savers, checkpoints)
        _check_parameters(module)
    if checkpoints.is_sharded and trainer.is_global_zero:
        _check_states(trainer)
    if checkpoints.is_sharded or trainer.is_global_zero:
        for folder in {os.fspath(one.dirpath): None for one in savers if one.dirpath is not None}:
            _check_writable(folder, trainer.global_rank)


def _check_links(savers: Sequence[ModelCheckpoint | OnExceptionCheckpoint], checkpoints: Checkpoints) -> None:
    linked = [one for one in savers if isinstance(one, ModelCheckpoint) and one.save_last == "link"]
    if linked and checkpoints.in_background:
        raise UnsupportedError(
            "ModelCheckpoint(save_last='link') links to a checkpoint as soon as it is saved, but with save_async=True "
            "it isn't complete then. Set save_last=True, or leave out save_async."
        )


def _check_parameters(module: "pl.LightningModule") -> None:
    for name, parameter in module.named_parameters():
        if not parameter.is_meta and is_tensor_subclass(parameter):
            raise UnsupportedError(
                f"{name} is a {type(parameter.data).__name__}, which isn't one plain tensor, as those of a "
                f"checkpoint's folder are. Leave out ModelCheckpoint (enable_checkpointing=False), {_ONE_FILE}"
            )


def _check_states(trainer: "pl.Trainer") -> None:
    """Those of callbacks, as far as they can be known yet."""
    for callback in callbacks_of(trainer):
        try:
            state = callback.state_dict()
        except Exception:  # it may need what training makes
            continue
        try:
            encode(with_distributed_marked(state), f"the state_dict() of {type(callback).__name__}")
        except HanayoError as error:
            raise UnsupportedError(f"{error} Store plain values there, {_ONE_FILE}") from error


def _check_writable(folder: str, rank: int) -> None:
    """Make and remove a file, in the folder or in the nearest one above it that there is."""
    storage = Storage.of(folder)
    if storage.is_local:
        above = os.path.abspath(storage.path)
        while not os.path.lexists(above):
            above = os.path.dirname(above)
        storage = Storage.of(above)
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
