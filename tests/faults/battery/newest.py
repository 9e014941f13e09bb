"""Finds the newest checkpoint of a folder, and checks that it is whole and has no NaN."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.format import MANIFEST


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint; 0 if there is none.

    Raises:
        ValueError: one is damaged, or has a value that isn't finite.
    """
    paths = [path for path in folder.glob("*.ckpt") if path.exists()] if folder.exists() else []
    return max((_step(path) for path in paths), default=0)


def _step(path: Path) -> int:
    if (path / MANIFEST).exists():
        return _our_step(CheckpointFolder(path))
    if path.is_dir():  # a distributed checkpoint of torch
        state = torch.load(path / "meta.pt", weights_only=False)
        _check_finite(path, _load_state_dict_from_keys({"state_dict"}, checkpoint_id=path)["state_dict"])
    else:
        state = torch.load(path, weights_only=False)
        _check_finite(path, state["state_dict"])
    return int(state["global_step"])


def _our_step(folder: CheckpointFolder) -> int:
    folder.verify()
    names = folder.manifest.tensors
    _check_finite(Path(folder.path), {name: folder.read(name) for name in names if name.startswith("model/")})
    return folder.manifest.step


def _check_finite(path: Path, tensors: dict[str, Any]) -> None:
    spoilt = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if spoilt:
        raise ValueError(f"{path.name} has NaN in {len(spoilt)} tensors, first {spoilt[0]}")
