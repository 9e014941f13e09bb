"""Opens a checkpoint of any kind as the dictionary that Lightning knows. Its tensors are read when they are used.

Compares two checkpoints of any kind, entry by entry, one tensor at a time.

What a resumed run needs besides the model and its optimizer: in several files of a folder, in one entry of a file.

            a folder                                    a file
the run     state.json: ["lightning_hanayo"]["run"]     ["lightning_hanayo"]["run"]
tensors     random/..., gradient/...                    ["lightning_hanayo"]["tensors"]
loaders     state-data-00001.json, data/1/<n>           ["lightning_hanayo"]["data"][1]

What a checkpoint folder holds, as the dictionary that Lightning knows: its tensors aren't read before they are used.

    {"state_dict": {"net.0.weight": a StoredTensor, ...},     one object under all names of a tied parameter
     "optimizer_states": [{"state": {"net.0.weight": {"exp_avg": a StoredTensor}}, "param_groups": [...]}],
     "loops": ..., "callbacks": ..., ...}

Optimizer states have the names of parameters in place of numbers.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.dist_checkpointing.commit import TensorPart
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder, verify_file
from lightning_hanayo.dist_checkpointing.format import damaged
from lightning_hanayo.dist_checkpointing.load_state import CLASS_NAME, parameters_in, with_keys
from lightning_hanayo.dist_checkpointing.plain_file import is_zip, load_mapped
from lightning_hanayo.dist_checkpointing.state import (
    RUN,
    STATE,
    WITHOUT_STATE,
    OptimizerDocument,
    StateDocument,
    data_stem,
    decode,
    encode,
)
from lightning_hanayo.dist_checkpointing.target import Storage
from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor
from lightning_hanayo.errors import CheckpointError


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
    if isinstance(entry := content.get(RUN), dict):
        tensors = {name: folder.stored(name) for name in folder.manifest.tensors if name.startswith(_PREFIXES)}
        content[RUN] = {**entry, "data": data_documents(folder), "tensors": tensors}
    return content


def _nested(folder: CheckpointFolder, name: str) -> Tensor:
    """A tensor of the document; read later if several ranks held it: an average of weights is as large as the model."""
    is_of_rank_0 = all(part.file.startswith(f"{STATE}-00000-") for part in folder.manifest.tensors[name].parts)
    return folder.read(name) if is_of_rank_0 else folder.stored(name)


def _state_dict(folder: CheckpointFolder, document: StateDocument) -> "OrderedDict[str, Any]":
    state: OrderedDict[str, Any] = OrderedDict()
    tensors: dict[str, StoredTensor] = {}
    for name in document.names:
        same = document.tied.get(name, name)
        if name in document.values:
            state[name] = document.values[name]
        elif f"model/{same}" in folder.manifest.tensors:
            state[name] = tensors.setdefault(same, folder.stored(f"model/{same}"))
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


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint that was verified."""

    path: str
    content: dict[str, Any]
    """as Lightning knows it; of a folder, states of optimizers have names of parameters in place of numbers"""
    folder: CheckpointFolder | None = None
    """None for a plain file"""


def tied_in_memory(state: Mapping[str, Any]) -> dict[str, str]:
    """Names of tensors that are an earlier one, or share its memory and have its shape: that one's name."""
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.numel():
            place = id(tensor) if isinstance(tensor, StoredTensor) else tensor.data_ptr()
            other = first.setdefault((place, tensor.shape, tensor.dtype), name)
            if other != name:
                tied[name] = other
    return tied


def open_checkpoint(path: str) -> OpenedCheckpoint:
    """Verify a checkpoint, and open it.

    Args:
        path: of a checkpoint folder (local or an fsspec URL) or of a plain, local file.

    Raises:
        CheckpointError: it isn't a checkpoint, isn't whole, or can't be read without running code.
    """
    storage = Storage(path)
    if not (storage.is_local and storage.is_file()):
        folder = CheckpointFolder(path)
        folder.verify()
        content = folder_content(folder)
        if isinstance(entry := content.get(RUN), dict):
            entry["data"] = {rank: read() for rank, read in entry["data"].items()}
        return OpenedCheckpoint(path, content, folder)
    if not is_zip(Path(storage.path)):
        raise CheckpointError(f"{path} is no checkpoint: neither a folder of this package nor a file of torch.save")
    verify_file(storage.path)
    content = load_mapped(storage.path, weights_only=True)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise CheckpointError(f"{path} is no checkpoint of Lightning: it has no 'state_dict'")
    return OpenedCheckpoint(path, content)


_MAX_TEXT = 40


@dataclass(frozen=True)
class Difference:
    """An entry of either checkpoint, and how it differs."""

    name: str
    what: str
    """"" if it is equal in both"""
    largest: float | None = None
    """the largest difference of two values; infinite if one of them is NaN"""


def compare(first: str, second: str, *, model_only: bool = False) -> list[Difference]:
    """Verify and compare two checkpoints: folders of any layout, or plain files.

    Args:
        model_only: leave out optimizers, loops, callbacks and all else.

    Example:
        >>> [one.name for one in compare("a.ckpt", "b.ckpt") if one.what]
        ['state_dict/net.0.weight']

    Raises:
        CheckpointError: one isn't whole, or can't be read without running code.
    """
    opened = [open_checkpoint(first), open_checkpoint(second)]
    one, other = (dict(_entries(_comparable(opened, index, model_only))) for index in (0, 1))
    return [_difference(name, one, other) for name in {**one, **other}]


def _comparable(opened: list[OpenedCheckpoint], index: int, model_only: bool) -> dict[str, Any]:
    """The content, with names in place of numbers in the states of optimizers, if the other one has names."""
    content = opened[index].content
    if model_only:
        return {"state_dict": content["state_dict"]}
    result = {key: value for key, value in content.items() if key != "hparams_name"}
    if "optimizer_states" in result:
        others = opened[1 - index].content.get("optimizer_states", [])
        result["optimizer_states"] = [
            _named(state, others[number] if number < len(others) else {})
            for number, state in enumerate(result["optimizer_states"])
        ]
    return result


def _named(state: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict, with the other one's names if it has numbers alone."""
    own, names = parameters_in(state), parameters_in(other)
    translated = dict(zip(own, names, strict=True)) if CLASS_NAME in other and len(own) == len(names) else {}
    renamed = with_keys(state, translated)
    return {**renamed, "state": {str(key): values for key, values in renamed["state"].items()}}


def _entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested dictionaries and lists, by path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _entries(inner, f"{name}/{key}".lstrip("/"))
    elif isinstance(value, list | tuple) and value:
        for index, inner in enumerate(value):
            yield from _entries(inner, f"{name}/{index}")
    else:
        yield name, value


def _difference(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Difference:
    if name not in other:
        return Difference(name, "only in the first")
    if name not in one:
        return Difference(name, "only in the second")
    a, b = one[name], other[name]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _of_tensors(name, a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor) or type(a) is not type(b):
        return Difference(name, f"{type(a).__name__} and {type(b).__name__}")
    try:
        is_equal = bool(a == b) or (a != a and b != b)  # NaN
    except (ValueError, RuntimeError):  # arrays
        is_equal = repr(a) == repr(b)
    if is_equal:
        return Difference(name, "")
    return Difference(name, f"{_short(a)} and {_short(b)}", abs(a - b) if isinstance(a, int | float) else None)


def _of_tensors(name: str, a: Tensor, b: Tensor) -> Difference:
    if a.shape != b.shape:
        return Difference(name, f"shapes {list(a.shape)} and {list(b.shape)}")
    if a.dtype != b.dtype:
        return Difference(name, f"{a.dtype} and {b.dtype}".replace("torch.", ""))
    a, b = _values(a), _values(b)
    differs = (a != b) & ((a == a) | (b == b))  # NaN equals NaN
    count = int(differs.sum())
    if not count:
        return Difference(name, "")
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    gap = (a[differs].to(wide) - b[differs].to(wide)).abs()
    largest = float(gap.nan_to_num(nan=float("inf")).max())
    return Difference(name, f"{count} of {a.numel()} values", largest)


def _values(tensor: Tensor) -> Tensor:
    read = StoredTensor.around(tensor).read()
    is_small = read.dtype.is_floating_point and read.element_size() == 1
    return read.float() if is_small else read  # NumPy's and torch's comparisons don't know all formats of 8 bits


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


_PREFIXES = ("random/", "gradient/")
_DATA_STEM = data_stem(0)[:-5]


def data_parts(documents: Mapping[int, Any]) -> tuple[list[TensorPart], dict[str, Any]]:
    """Returns the tensors in the documents of data ranks, and the documents by stem.

    Raises:
        UnsupportedError: a loader's state can't be stored without pickle.
    """
    parts, texts = [], {}
    for rank, document in documents.items():
        texts[data_stem(rank)], tensors = encode(document, "state of the training loaders")
        parts += [TensorPart.whole(f"data/{rank}/{number}", one, "state") for number, one in enumerate(tensors)]
    return parts, texts


def data_documents(folder: CheckpointFolder) -> dict[int, Callable[[], Any]]:
    """What reads the document of each data rank and its tensors, or raises a CheckpointError if one isn't whole."""

    def read(rank: int) -> Any:
        return decode(folder.text(data_stem(rank)), lambda number: folder.read(f"data/{rank}/{number}"))

    texts = folder.manifest.texts
    numbers = sorted(int(one) for stem in texts if (one := stem.removeprefix(_DATA_STEM)).isdecimal())
    return {rank: partial(read, rank) for rank in numbers if data_stem(rank) in texts}
