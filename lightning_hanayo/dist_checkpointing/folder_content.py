"""What a checkpoint folder holds, as the dictionary that Lightning knows: its tensors aren't read before they are used.

    {"state_dict": {"net.0.weight": a StoredTensor, ...},
     "optimizer_states": [{"state": {"net.0.weight": {"exp_avg": a StoredTensor}}, "param_groups": [...]}],
     "loops": ..., "callbacks": ..., ...}

Optimizer states have the names of parameters in place of numbers.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.format import damaged
from lightning_hanayo.dist_checkpointing.load_state import CLASS_NAME
from lightning_hanayo.dist_checkpointing.read_tensor import StoredTensor
from lightning_hanayo.dist_checkpointing.state import STATE, WITHOUT_STATE, OptimizerDocument, StateDocument


def folder_content(folder: CheckpointFolder) -> dict[str, Any]:
    """Read the document of a folder, and no tensor but those of callbacks and other values.

    Raises:
        CheckpointError: the document and the manifest don't belong together.
    """
    where = folder.where(folder.manifest.texts.get(STATE, f"{STATE}.json"))
    try:
        document = StateDocument.decode(folder.text(STATE), lambda number: _nested(folder, f"{STATE}/{number}"), where)
    except KeyError as error:
        raise damaged(where, f"there is no {error}") from None
    content = {**document.checkpoint, "state_dict": _state_dict(folder, document)}
    if document.optimizers is not None:
        states = _optimizer_tensors(folder)
        content["optimizer_states"] = [
            _optimizer_state(one, states[str(index)]) for index, one in enumerate(document.optimizers)
        ]
    return content


def _nested(folder: CheckpointFolder, name: str) -> Tensor:
    """A tensor of the document; read later if several ranks held it: an average of weights is as large as the model."""
    is_of_rank_0 = all(part.file.startswith(f"{STATE}-00000-") for part in folder.manifest.tensors[name].parts)
    return folder.read(name) if is_of_rank_0 else folder.stored(name)


def _state_dict(folder: CheckpointFolder, document: StateDocument) -> "OrderedDict[str, Any]":
    state: OrderedDict[str, Any] = OrderedDict()
    for name in document.names:
        stored = f"model/{document.tied.get(name, name)}"
        if name in document.values:
            state[name] = document.values[name]
        elif stored in folder.manifest.tensors:
            state[name] = folder.stored(stored)
        else:
            raise damaged(folder.path, f"it has no values of {name}")
    state._metadata = dict(document.versions)  # type: ignore[attr-defined]
    return state


def _optimizer_tensors(folder: CheckpointFolder) -> Mapping[str, dict[str, dict[str, StoredTensor]]]:
    """The tensors of all optimizers: by the optimizer's number, the parameter and the key."""
    found: Mapping[str, dict[str, dict[str, StoredTensor]]] = defaultdict(lambda: defaultdict(dict))
    for name in folder.manifest.tensors:
        if name.startswith("optimizer/"):
            index, _, place = name.removeprefix("optimizer/").partition("/")
            parameter, _, key = place.rpartition("/")
            found[index][parameter][key] = folder.stored(name)
    return found


def _optimizer_state(document: OptimizerDocument, tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    names = [name for group in document.param_groups for name in group["params"]]
    ordered = dict.fromkeys([*(name for name in names if name in tensors or name in document.values), *tensors])
    return {
        **document.rest,
        "state": {name: {**tensors.get(name, {}), **document.values.get(name, {})} for name in ordered},
        "param_groups": [dict(group) for group in document.param_groups],
        WITHOUT_STATE: list(document.without_state),
        CLASS_NAME: document.class_name,
    }
