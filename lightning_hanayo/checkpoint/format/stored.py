"""Says in which files a tensor is stored, and what a manifest says of a file."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_hanayo.checkpoint.format.header import ITEM_BYTES
from lightning_hanayo.checkpoint.format.json_checks import ImpossibleError, count, matching, require, typed
from lightning_hanayo.checkpoint.format.region import Region, Runs, partition_problem

_MAX_DIMS = 32
"""that NumPy has in all its versions"""
_HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor: where it is, and which entries of the whole it holds."""

    file: str
    key: str
    region: Region
    xxh3_128: str
    """of its bytes"""


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the single-process model. `dtype` is named as safetensors does: "F32"."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredPart, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all its entries."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class StoredFile:
    """A file's size, and the hash of its header if it has tensors, else of the whole file."""

    num_bytes: int
    xxh3_128: str


def tensor_document(name: str, tensor: WholeTensor) -> dict[str, Any]:
    """Returns what a manifest says of a tensor, without keys that are the tensor's name, and runs of whole parts."""
    whole = Region.whole(tensor.shape)
    parts = []
    for part in tensor.parts:
        document: dict[str, Any] = {"file": part.file, "xxh3_128": part.xxh3_128}
        if part.key != name:
            document["key"] = part.key
        if part.region != whole:
            document["runs"] = part.region.runs
        parts.append(document)
    return {"dtype": tensor.dtype, "shape": tensor.shape, "parts": parts}


def parse_file(name: str, document: Any) -> StoredFile:
    """Returns the file that a manifest's document describes, or raises an ImpossibleError."""
    document = typed(document, dict, f"the file {name!r}")
    return StoredFile(
        count(document.get("bytes"), f"the size of {name}"),
        matching(document.get("xxh3_128"), _HASH, f"the hash of {name}"),
    )


def parse_tensor(name: str, document: Any, files: Mapping[str, StoredFile]) -> WholeTensor:
    """Returns the tensor that a manifest's document describes, in these files, or raises an ImpossibleError."""
    require(name.isprintable(), f"the name {name!r} can't be shown")
    document = typed(document, dict, f"the tensor {name!r}")
    shape = tuple(count(size, f"the shape of {name}") for size in typed(document.get("shape"), list, f"{name}.shape"))
    dtype = typed(document.get("dtype"), str, f"the dtype of {name}")
    require(dtype in ITEM_BYTES, f"{name} has the dtype {dtype!r}, which nobody knows")
    require(len(shape) <= _MAX_DIMS, f"{name} has {len(shape)} dimensions")
    require(math.prod(size or 1 for size in shape) * ITEM_BYTES[dtype] < 2**63, f"the shape of {name} is absurd")
    parts = tuple(_part(name, shape, one, files) for one in typed(document.get("parts"), list, f"the parts of {name}"))
    problem = partition_problem(shape, [part.region for part in parts])
    require(problem is None, f"the parts of {name} don't make it up: {problem}")
    return WholeTensor(shape, dtype, parts)


def _part(name: str, shape: tuple[int, ...], document: Any, files: Mapping[str, StoredFile]) -> StoredPart:
    document = typed(document, dict, f"a part of {name}")
    runs = document.get("runs")
    return StoredPart(
        known_file(document.get("file"), files, ".safetensors"),
        typed(document.get("key", name), str, f"the key of {name}"),
        Region.whole(shape) if runs is None else Region(tuple(_runs(name, one) for one in typed(runs, list, "runs"))),
        matching(document.get("xxh3_128"), _HASH, f"the hash of {name}"),
    )


def _runs(name: str, document: Any) -> Runs:
    runs = []
    for one in typed(document, list, f"the runs of {name}"):
        match one:
            case [int(start), int(stop)] if 0 <= start < stop < 2**63:
                runs.append((start, stop))
            case _:
                raise ImpossibleError(f"{name} has a run that is no pair of indices")
    return tuple(runs)


def known_file(name: Any, files: Mapping[str, StoredFile], ending: str) -> str:
    """Returns the name of a file with this ending, which must be one of these."""
    require(isinstance(name, str) and name in files and name.endswith(ending), f"{name!r} isn't one of its files")
    return str(name)
