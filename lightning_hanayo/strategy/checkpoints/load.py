"""Reads a checkpoint, of whatever layout and format, as the dictionary that Lightning and its hooks know.

a folder        manifest, hashes of all bytes, values without pickle; tensors are read when they are used
a plain file    its CRCs, then torch.load: only tensors and plain values, of which only the pages used are read
anything else   the Trainer's CheckpointIO: old files, remote ones
"""

import pickle
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO

from lightning_hanayo.checkpoint.format.manifest import MANIFEST
from lightning_hanayo.checkpoint.load import plain_file
from lightning_hanayo.checkpoint.load.folder import CheckpointFolder
from lightning_hanayo.checkpoint.load.folder_content import folder_content
from lightning_hanayo.checkpoint.load.model_check import Source
from lightning_hanayo.checkpoint.load.verify import verify_on_all_ranks
from lightning_hanayo.errors import CheckpointError, CheckpointNotFoundError
from lightning_hanayo.strategy.checkpoints.resume import KEY
from lightning_hanayo.strategy.checkpoints.resume_storage import saved_in_folder
from lightning_hanayo.strategy.groups.on_all_ranks import on_all_ranks, with_common_errors

_NEEDED = ("state_dict", "pytorch-lightning_version")


class Checkpoint(dict[str, Any]):
    """A checkpoint as Lightning knows it, and where it comes from."""

    source: Source

    @staticmethod
    def of(content: Any, source: Source) -> "Checkpoint":
        """What a file of any origin holds.

        Raises:
            CheckpointError: it is no checkpoint.
        """
        missing = [name for name in _NEEDED if not isinstance(content, dict) or name not in content]
        if missing:
            raise CheckpointError(
                f"{source} is no Lightning checkpoint: it has no {missing[0]!r}. Weights alone are loaded before "
                f"training: module.load_state_dict(torch.load(path))."
            )
        checkpoint = Checkpoint(content)
        checkpoint.source = source
        return checkpoint

    @staticmethod
    def source_of(checkpoint: Any) -> Source:
        """Where it comes from; user code may have made it."""
        return getattr(checkpoint, "source", Source("The checkpoint"))


def read_checkpoint(path: str | Path, io: CheckpointIO, *, weights_only: bool | None, verify: bool) -> Checkpoint:
    """Check a checkpoint and return it. Called by all ranks of the world.

    Args:
        path: of a folder or file, local or remote.
        io: the Trainer's, for what is neither a folder of this package nor a file in torch's format.
        weights_only: as for `torch.load`.
        verify: whether all bytes are checked.

    Raises:
        CheckpointNotFoundError: no rank finds it.
        CheckpointError: on all ranks, if it is damaged, incomplete, no checkpoint, or would run code.
    """
    _check_seen(path)
    if _is_folder(path, io):
        return _read_folder(path, verify)
    if type(io) is TorchCheckpointIO and _is_local(path):
        path = url_to_fs(str(path))[1]  # without file://, ~ and a slash at the end
    if type(io) is not TorchCheckpointIO:
        content = io.load_checkpoint(path, weights_only=weights_only)
    elif _is_local(path) and plain_file.is_zip(path):
        if verify:
            with_common_errors(lambda: plain_file.verify(path, *_place()))
        content = with_common_errors(lambda: plain_file.load_mapped(path, weights_only=weights_only))
    else:
        content = with_common_errors(lambda: _load_whole(path, io, weights_only))
    return with_common_errors(lambda: Checkpoint.of(content, Source(str(path))))


def _is_folder(path: str | Path, io: CheckpointIO) -> bool:
    """Whether it is a folder of this package, or one that is to be refused as such: other CheckpointIOs have others."""
    system = get_filesystem(path)
    is_ours = type(io) is TorchCheckpointIO or system.exists(f"{str(path).rstrip('/')}/{MANIFEST}")
    return bool(system.isdir(str(path))) and is_ours


def _read_folder(path: str | Path, verify: bool) -> Checkpoint:
    folder = with_common_errors(lambda: CheckpointFolder(path))
    saves = on_all_ranks(lambda: folder.manifest.save_id)
    if len(set(saves)) > 1:
        raise CheckpointError(
            f"Ranks see different checkpoints in {path}: those of the saves {', '.join(sorted(set(saves)))}. Give a "
            f"path on a file system that all ranks share, or copy the folder to each node again."
        )
    if verify:
        verify_on_all_ranks(folder, *_place(), _gather)
    content = Checkpoint(with_common_errors(lambda: folder_content(folder)))
    content.source = Source(str(path), str(folder.manifest.about.get("module", "")).rpartition(".")[2] or None)
    if KEY in content:
        content[KEY] = saved_in_folder(folder, content[KEY])
    return content


def _gather(problem: str | None) -> list[Any]:
    return on_all_ranks(lambda: problem)


def _load_whole(path: str | Path, io: CheckpointIO, weights_only: bool | None) -> Any:
    try:
        return io.load_checkpoint(path, weights_only=weights_only)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise plain_file.refusal(path, error) from None


def _check_seen(path: str | Path) -> None:
    seen = on_all_ranks(lambda: bool(get_filesystem(path).exists(str(path))))
    if not any(seen):
        raise CheckpointNotFoundError(f"Checkpoint file not found: {path}")
    if not all(seen):
        raise CheckpointError(
            f"rank {seen.index(False)} finds no {path}, which rank {seen.index(True)} does. Give a path on a file "
            f"system that all ranks see."
        )


def _is_local(path: str | Path) -> bool:
    return isinstance(get_filesystem(path), LocalFileSystem)


def _place() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
