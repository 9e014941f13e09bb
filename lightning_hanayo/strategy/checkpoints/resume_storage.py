"""Where a checkpoint stores what a resume needs: in a folder each rank its part; in one file all of it, under one key.

             a folder                                               one file
the run      state.json: checkpoint["lightning_hanayo"]["run"]      checkpoint["lightning_hanayo"]["run"]
data ranks   state-data-00001.json, written where data is read      ["data"][1]
tensors      random/..., gradient/..., data/1/<n>: in any file      ["tensors"], gathered on rank 0, whole
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hanayo.checkpoint.format.plain_values import decode, encode
from lightning_hanayo.checkpoint.format.region import Region
from lightning_hanayo.checkpoint.format.state_document import data_stem
from lightning_hanayo.checkpoint.load.folder import CheckpointFolder
from lightning_hanayo.checkpoint.load.stored_tensor import StoredTensor
from lightning_hanayo.checkpoint.save.part import RankPart, TensorPart
from lightning_hanayo.strategy.checkpoints.resume import KEY, ResumeState, SavedRun

_DATA = "data/"


def with_resume(part: RankPart, state: ResumeState, data_rank: int) -> RankPart:
    """What this rank writes into a folder, with what a resume needs; not the document of the run, `run_entry`.

    Raises:
        UnsupportedError: a loader's state can't be stored without pickle.
    """
    if state.data_document is None:
        return replace(part, tensors=[*part.tensors, *state.tensors])
    document, found = encode(state.data_document, "state of the training loaders")
    tensors = [TensorPart.whole(f"{_DATA}{data_rank}/{n}", tensor, "state") for n, tensor in enumerate(found)]
    texts = {**part.texts, data_stem(data_rank): document}
    return replace(part, tensors=[*part.tensors, *state.tensors, *tensors], texts=texts)


def run_entry(state: ResumeState) -> dict[str, Any]:
    """The entry of Lightning's dictionary, under `KEY`, of a checkpoint that is a folder."""
    return {"run": dict(state.document)}


def saved_in_folder(folder: CheckpointFolder, entry: Mapping[str, Any]) -> SavedRun:
    """What a folder says of the run; `entry` is what `run_entry` has made."""

    def data_document(data_rank: int) -> Mapping[str, Any]:
        if data_stem(data_rank) not in folder.manifest.texts:
            return {}
        found: dict[str, Any] = decode(
            folder.text(data_stem(data_rank)), lambda n: folder.read(f"{_DATA}{data_rank}/{n}")
        )
        return found

    return SavedRun(entry["run"], data_document, folder.manifest.tensors.keys(), folder.read)


def gathered(state: ResumeState, data_rank: int, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """The entry of the file, on rank 0.

    Args:
        state: of this rank.
        data_rank: this rank's.
        gather: gives every rank's value on rank 0. Called by all ranks.
    """
    ranks = gather((data_rank, state.data_document, [_in_host_memory(part) for part in state.tensors]))
    documents = {number: document for number, document, _ in ranks if document is not None}
    tensors = _joined(part for *_, parts in ranks for part in parts)
    return {"run": dict(state.document), "data": documents, "tensors": tensors}


def saved_run(checkpoint: Mapping[str, Any]) -> SavedRun | None:
    """What the dictionary of a checkpoint says of the run; None if it says nothing."""
    found = checkpoint.get(KEY)
    if found is None or isinstance(found, SavedRun):
        return found
    tensors = found["tensors"]

    def read(name: str, region: Region | None) -> Tensor:
        return StoredTensor.around(tensors[name]).read(region)

    return SavedRun(found["run"], lambda data_rank: found["data"].get(data_rank, {}), list(tensors), read)


def _in_host_memory(part: TensorPart) -> TensorPart:
    return replace(part, tensor=part.tensor.detach().cpu())


def _joined(parts: Iterable[TensorPart]) -> dict[str, Tensor]:
    wholes: dict[str, Tensor] = {}
    for part in parts:
        whole = wholes.setdefault(part.name, torch.zeros(part.shape, dtype=part.tensor.dtype))
        whole[_indices(part.region)] = part.tensor
    return wholes


def _indices(region: Region) -> Any:
    """Indexes the region of a whole tensor."""
    along = [np.concatenate([np.arange(0), *(np.arange(*run) for run in runs)]) for runs in region.runs]
    return tuple(torch.from_numpy(indices) for indices in np.ix_(*along)) if along else ...
