"""What a resume needs, in the one file that a plain Trainer reads, too: gathered on rank 0, under one key.

rank 0   random/0/torch   gradient/0/embedding.weight             ->  checkpoint["lightning_hanayo"]["tensors"], whole
rank 1   random/1/torch   gradient/0/blocks.1.weight [rows 0-3]   ->
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hanayo.checkpoint.format.region import Region
from lightning_hanayo.checkpoint.save.part import TensorPart
from lightning_hanayo.strategy.checkpoints.resume import KEY, ResumeState, SavedRun


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
        whole: Tensor = tensors[name]
        return whole.clone() if region is None else whole[_indices(region)].clone()

    return SavedRun(found["run"], found["data"], list(tensors), read)


def _in_host_memory(part: TensorPart) -> TensorPart:
    return TensorPart(part.name, part.tensor.detach().cpu(), part.shape, part.region, part.kind)


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
