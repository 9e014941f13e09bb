"""Reads checkpoints, files and folders alike, as dictionaries with whole tensors."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.state import STATE, StateDocument


def read(path: Path | str) -> dict[str, Any]:
    """What Lightning has saved. The optimizer states of a folder have names instead of numbers of parameters."""
    return _read_folder(Path(path)) if Path(path).is_dir() else torch.load(path, weights_only=True)


def _read_folder(path: Path) -> dict[str, Any]:
    folder = CheckpointFolder(path)
    folder.verify()
    state = StateDocument.decode(folder.text(STATE), lambda n: folder.read(f"state/{n}"), str(path))
    optimizers = [
        {"state": _states(folder, index, one.values), "param_groups": one.param_groups} if one.param_groups else {}
        for index, one in enumerate(state.optimizers or ())
    ]
    entries = OrderedDict(
        (name, state.values[name] if name in state.values else folder.read(f"model/{state.tied.get(name, name)}"))
        for name in state.names
    )
    content = {**state.checkpoint, "state_dict": entries}
    return content if state.optimizers is None else {**content, "optimizer_states": optimizers}


def _states(folder: CheckpointFolder, index: int, values: Any) -> dict[str, Any]:
    states: dict[str, Any] = {name: dict(one) for name, one in values.items()}
    prefix = f"optimizer/{index}/"
    for name in folder.manifest.tensors:
        if name.startswith(prefix):
            parameter, _, key = name.removeprefix(prefix).rpartition("/")
            states.setdefault(parameter, {})[key] = folder.read(name)
    return states
