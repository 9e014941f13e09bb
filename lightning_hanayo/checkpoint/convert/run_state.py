"""What a resumed run needs besides the model and its optimizer: in several files of a folder, in one entry of a file.

            a folder                                    a file
the run     state.json: ["lightning_hanayo"]["run"]     ["lightning_hanayo"]["run"]
tensors     random/..., gradient/...                    ["lightning_hanayo"]["tensors"]
loaders     state-data-00001.json, data/1/<n>           ["lightning_hanayo"]["data"][1]
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_hanayo.checkpoint.format.plain_values import decode, encode
from lightning_hanayo.checkpoint.format.state_document import RUN, data_stem
from lightning_hanayo.checkpoint.format.tensor_file import dtype_named
from lightning_hanayo.checkpoint.load.folder import CheckpointFolder
from lightning_hanayo.checkpoint.load.stored_tensor import StoredTensor
from lightning_hanayo.checkpoint.save.part import TensorPart

_PREFIXES = ("random/", "gradient/")
_STEM = data_stem(0)[:-5]


def as_in_a_file(folder: CheckpointFolder, entry: Any) -> Any:
    """Returns the entry of a file, whose tensors aren't read before they are used.

    Args:
        entry: the folder's.

    Raises:
        CheckpointError: the document of a data rank isn't whole.
    """
    if not isinstance(entry, dict):
        return entry
    tensors = {name: _stored(folder, name) for name in folder.manifest.tensors if name.startswith(_PREFIXES)}
    ranks = [int(stem.removeprefix(_STEM)) for stem in folder.manifest.texts if _is_of_data(stem)]
    return {**entry, "data": {rank: _document(folder, rank) for rank in sorted(ranks)}, "tensors": tensors}


def as_in_a_folder(content: dict[str, Any]) -> tuple[list[TensorPart], dict[str, Any]]:
    """Returns the tensors, and the documents of data ranks by stem. They are taken out of the content of a file.

    Raises:
        UnsupportedError: a loader's state can't be stored without pickle.
    """
    entry = content.get(RUN)
    if not isinstance(entry, dict):
        return [], {}
    content[RUN] = {key: value for key, value in entry.items() if key not in ("data", "tensors")}
    found = {name: tensor for name, tensor in _items(entry, "tensors") if str(name).startswith(_PREFIXES)}
    parts = [TensorPart.whole(name, tensor, "state") for name, tensor in found.items() if isinstance(tensor, Tensor)]
    texts = {}
    for rank, value in _items(entry, "data"):
        texts[data_stem(rank)], tensors = encode(value, "state of the training loaders")
        parts += [TensorPart.whole(f"data/{rank}/{number}", tensor, "state") for number, tensor in enumerate(tensors)]
    return parts, texts


def _is_of_data(stem: str) -> bool:
    number = stem.removeprefix(_STEM)
    return number.isdecimal() and data_stem(int(number)) == stem


def _document(folder: CheckpointFolder, rank: int) -> Any:
    return decode(folder.text(data_stem(rank)), lambda number: folder.read(f"data/{rank}/{number}"))


def _stored(folder: CheckpointFolder, name: str) -> StoredTensor:
    tensor = folder.manifest.tensors[name]
    return StoredTensor.of(tensor.shape, dtype_named(tensor.dtype), lambda region: folder.read(name, region))


def _items(entry: Mapping[str, Any], key: str) -> Any:
    value = entry.get(key)
    return value.items() if isinstance(value, dict) else ()
