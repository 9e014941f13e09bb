"""Writes a plain checkpoint as a folder, cut as two ranks would: names of parameters instead of numbers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import AdamW

from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.state import OptimizerDocument, StateDocument
from tests.checkpoint.folders import write_folder

NOT_IN_DOCUMENT = ("state_dict", "optimizer_states")


def as_folder(checkpoint: Mapping[str, Any], path: Path, names: Sequence[str]) -> None:
    """Write it.

    Args:
        checkpoint: of an AdamW and a model of tensors only.
        path: of the folder.
        names: of the optimizer's parameters, in order.
    """
    tensors: dict[str, Tensor] = {f"model/{name}": value for name, value in checkpoint["state_dict"].items()}
    documents = []
    for index, state in enumerate(checkpoint["optimizer_states"]):
        for number, values in state["state"].items():
            tensors |= {f"optimizer/{index}/{names[number]}/{key}": value for key, value in values.items()}
        groups = [{**group, "params": [names[n] for n in group["params"]]} for group in state["param_groups"]]
        documents.append(OptimizerDocument(f"{AdamW.__module__}.{AdamW.__qualname__}", groups))
    plain = {key: value for key, value in checkpoint.items() if key not in NOT_IN_DOCUMENT}
    document, others = StateDocument(plain, list(checkpoint["state_dict"]), optimizers=documents).encode()
    tensors |= {f"state/{number}": tensor for number, tensor in enumerate(others)}
    cut = {name: _rows(value) for name, value in tensors.items() if value.dim() > 1}
    write_folder(path, tensors, cut, texts={"state": json.dumps(document).encode()})


def _rows(tensor: Tensor) -> list[Region]:
    """Even rows, then odd ones."""
    num_rows, *others = tensor.shape
    return [Region.of_entries([range(start, num_rows, 2), *map(range, others)]) for start in (0, 1)]
