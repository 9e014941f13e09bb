"""Reads checkpoints, files and folders alike, as dictionaries with whole tensors, and writes folders of them."""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.dist_checkpointing.commit import RankPart, SavingRanks, TensorPart
from lightning_hanayo.dist_checkpointing.compare import data_parts, tied_in_memory
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.load_state import parameters_in, with_keys
from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.state import RUN, STATE, OptimizerDocument, StateDocument

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""of normalization layers: no optimizer has them"""


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


def write(path: Path | str, content: Mapping[str, Any]) -> None:
    """Save as a folder what Lightning has saved as a file, as one rank alone would."""
    rest = dict(content)
    state, states, entry = rest.pop("state_dict"), rest.pop("optimizer_states", None), rest.pop(RUN, None)
    tied, texts = tied_in_memory(state), {}
    tensors = {f"model/{name}": one for name, one in state.items() if name not in tied}
    parameters = [name for name in state if name not in tied and name.rpartition(".")[2] not in STATISTICS]
    documents = []
    for index, saved in enumerate(states or ()):
        named = with_keys(saved, dict(zip(parameters_in(saved), parameters, strict=True)))
        values: dict[str, dict[str, Any]] = {}
        for name, key, one in ((name, *item) for name, its in named["state"].items() for item in its.items()):
            if isinstance(one, Tensor):
                tensors[f"optimizer/{index}/{name}/{key}"] = one
            else:
                values.setdefault(name, {})[key] = one
        documents.append(OptimizerDocument("", named["param_groups"], values, [], {}))
    parts: list[TensorPart] = []
    if entry is not None:
        rest[RUN] = {key: one for key, one in entry.items() if key not in ("data", "tensors")}
        parts, texts = data_parts(entry["data"])
        tensors |= entry["tensors"]
    versions = dict(getattr(state, "_metadata", {}))
    document = StateDocument(rest, list(state), tied, {}, versions, None if states is None else documents)
    texts[STATE], others = document.encode()
    tensors |= {f"{STATE}/{number}": one for number, one in enumerate(others)}
    parts += [TensorPart.whole(name, one, "model") for name, one in tensors.items()]
    about = {"step": content.get("global_step", 0), "epoch": content.get("epoch", 0), "layout": {}, "tied": tied}
    Saver(SavingRanks()).save(str(path), RankPart(parts, texts, about))
