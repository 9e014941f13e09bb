"""Writes a checkpoint in a format that other tools read.

file           one file of Lightning: a plain Trainer and `load_from_checkpoint` read it
safetensors    a folder with the module's weights under the module's names
huggingface    a folder that `from_pretrained` of transformers reads: its names, and config.json

Writes the file that `torch.save` would write, one tensor at a time, so that no two of them are in memory at once.

archive/data.pkl     the objects; in place of a tensor's values it has the number of a record
archive/data/0       the bytes of the first tensor
archive/data/1       ...

Writes tensors to safetensors files in Hugging Face's layout: one file, or several of a limited size with an index.

folder/model.safetensors       or       folder/model.safetensors.index.json      {"weight_map": {name: file}}
                                        folder/model-00001-of-00002.safetensors
                                        folder/model-00002-of-00002.safetensors

Reads the weights of a checkpoint folder as those of a folder of safetensors: for `init_from`.
"""

import io
import json
import os
import pickle
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from lightning_hanayo.dist_checkpointing import huggingface
from lightning_hanayo.dist_checkpointing.compare import (
    OpenedCheckpoint,
    folder_content,
    open_checkpoint,
    tied_in_memory,
)
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.format import MANIFEST
from lightning_hanayo.dist_checkpointing.load_state import parameters_in, with_keys
from lightning_hanayo.dist_checkpointing.plain_file import write_file
from lightning_hanayo.dist_checkpointing.state import WITHOUT_STATE
from lightning_hanayo.dist_checkpointing.target import Storage
from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor, bytes_of, write_tensors
from lightning_hanayo.errors import HanayoError, nearest, writing


def write_torch_file(file: BinaryIO, value: Any) -> None:
    """Write a value for `torch.load`.

    Args:
        file: open for writing, at its beginning.
        value: tensors in it may be `StoredTensor`s, which are read when they are written. A tensor that is there twice
            is stored once.

    Example:
        >>> with open("whole.ckpt", "wb") as file:
        ...     write_torch_file(file, folder_content(folder))
    """
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(value)
    with torch.serialization._open_zipfile_writer(file) as archive:
        archive.write_record("data.pkl", text.getvalue(), text.tell())
        archive.write_record("byteorder", b"little", len(b"little"))
        for number, tensor in enumerate(pickler.tensors):
            data = bytes_of(tensor)
            values = torch.frombuffer(data, dtype=torch.uint8).untyped_storage() if len(data) else b""
            archive.write_record(f"data/{number}", values, len(data))
            del data, values  # before the next one is read


@dataclass(frozen=True)
class _Values:
    """Stands for the values of a tensor."""

    number: int
    num_bytes: int


class _Pickler(pickle.Pickler):
    """Pickles everything but the values of tensors, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        """How a tensor is rebuilt; anything else as always."""
        if not isinstance(value, Tensor):
            return NotImplemented
        self.tensors.append(value)
        values = _Values(len(self.tensors) - 1, value.nbytes)
        stride = torch.empty(value.shape, device="meta").stride()
        hooks: OrderedDict[int, object] = OrderedDict()
        return torch._utils._rebuild_tensor_v3, (values, 0, tuple(value.shape), stride, False, hooks, value.dtype)

    def persistent_id(self, value: Any) -> Any:
        """Where `torch.load` finds the values of a tensor."""
        if not isinstance(value, _Values):
            return None
        return ("storage", torch.UntypedStorage, str(value.number), "cpu", value.num_bytes)


MAX_SHARD_SIZE = 5 * 10**9
"""bytes per file"""
_STEM, _ENDING = "model", ".safetensors"


def write_weights(folder: Path, tensors: Mapping[str, Tensor], max_shard_size: int = MAX_SHARD_SIZE) -> list[str]:
    """Write the files, and return their names.

    Args:
        folder: exists.
        tensors: by name. `StoredTensor`s are read one after another.
        max_shard_size: bytes of tensors in a file, unless a single one has more.
    """
    shards = list(_shards(tensors, max_shard_size))
    storage = Storage(str(folder))
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        many = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        with storage.create(f"{_STEM}{many}{_ENDING}") as file:
            write_tensors(file, {name: tensors[name] for name in names})
        files |= dict.fromkeys(names, f"{_STEM}{many}{_ENDING}")
    written = sorted(set(files.values()))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": files}
        written.append(f"{_STEM}{_ENDING}.index.json")
        with storage.create(written[-1]) as file:
            file.write((json.dumps(index, indent=2) + "\n").encode())
    return written


def check_free(path: str) -> None:
    """Raises a HanayoError if there is something at a path, local or remote; an empty folder is nothing."""
    storage = Storage(path)
    if storage.is_file() or (storage.is_folder() and storage.names()):
        raise HanayoError(f"{path} exists. Give another path, or remove it first.")


@contextmanager
def new_folder(path: str) -> Iterator[Path]:
    """Inside it, the folder has another name; it gets its own at the end, or is removed if there is an error.

    Raises:
        HanayoError: there is something at the path, or it can't be written.
    """
    check_free(path)
    target = Path(os.path.abspath(path))
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    with writing(path):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            Storage(str(temporary)).rename(str(target))
        finally:
            if temporary.exists():
                shutil.rmtree(temporary)


def _shards(tensors: Mapping[str, Tensor], most: int) -> Iterator[list[str]]:
    """Names for one file after another."""
    shard: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += tensor.nbytes
    yield shard


Format = Literal["file", "safetensors", "huggingface"]
FORMATS: tuple[Format, ...] = ("file", "safetensors", "huggingface")


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: str
    num_tensors: int
    """of the model"""
    files: Sequence[str] = ()
    """in a folder, by name"""
    left_out: Sequence[str] = ()
    """entries of the state dict that have no place in the new format"""
    notes: Sequence[str] = field(default=())
    """what else the user should know"""


def export_checkpoint(
    path: str,
    target: str,
    *,
    to: Format,
    module: str | None = None,
    config: str | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> Exported:
    """Verify a checkpoint, and write it in another format. Call it in one process.

    No more than one tensor at a time is in memory, or those of a layer that transformers converts.

    Args:
        path: a checkpoint folder, local or an fsspec URL, or a plain file of Lightning.
        target: where nothing is yet. A file may be on a remote file system; folders are local.
        to: "file", "safetensors" or "huggingface".
        module: the name in the LightningModule of the model of transformers, such as "net"; None: the one that fits.
        config: a folder with its config.json; None: the configuration that the checkpoint has.
        max_shard_size: bytes of tensors in one file of a folder.

    Example:
        >>> export_checkpoint("checkpoints/last.ckpt", "whole.ckpt", to="file")
        >>> export_checkpoint("checkpoints/last.ckpt", "gpt2-tuned", to="huggingface")
        >>> model = GPT2LMHeadModel.from_pretrained("gpt2-tuned")

    Raises:
        CheckpointError: the checkpoint isn't whole, or the target can't be written.
        HanayoError: the target exists, or the checkpoint doesn't fit the format.
        UnsupportedError: transformers is missing, or converts the model's weights in a way that can't be followed.
    """
    if to not in FORMATS:
        raise HanayoError(f"there is no format {to!r}: {nearest(to, FORMATS)}")
    if max_shard_size < 1:
        raise HanayoError(f"max_shard_size={max_shard_size}: expected a number of bytes")
    check_free(target)
    opened = open_checkpoint(path)
    if to == "file":
        return _to_file(opened, target)
    if to == "safetensors":
        return _to_safetensors(opened, target, max_shard_size)
    return _to_huggingface(opened, target, module, config, max_shard_size)


def read_folder(path: Any, map_location: Any = None) -> dict[str, Any] | None:
    """Verify a checkpoint folder, and return what a file of Lightning would hold; None if there is no folder.

    Called in one process. Tensors are read when they are used; those of the model at once if they are for a device.

    Args:
        path: of the folder, local or an fsspec URL, or anything else that Lightning reads checkpoints from.
        map_location: as for `torch.load`.

    Raises:
        CheckpointError: the folder isn't a whole checkpoint.
    """
    if not isinstance(path, str | os.PathLike) or not Storage(os.fspath(path)).is_folder():
        return None
    content, device = _as_in_a_file(open_checkpoint(os.fspath(path))), _device(map_location)
    for state in content.get("optimizer_states", ()):  # torch's optimizers keep such numbers as they get them
        for values in state["state"].values():
            values.update((key, one.read()) for key, one in values.items() if _is_stored(one) and one.dim() == 0)
    if device.type != "cpu":
        state = content["state_dict"]
        state.update((name, one.read().to(device)) for name, one in state.items() if _is_stored(one))
    return content


def _is_stored(value: Any) -> bool:
    return isinstance(value, StoredTensor)


def _device(map_location: Any) -> torch.device:
    """Where `torch.load` would put a tensor that was saved from the CPU."""
    move = torch.serialization._get_restore_location(map_location)  # type: ignore[no-untyped-call]
    device: torch.device = move(torch.empty(0).untyped_storage(), "cpu").device
    return device


def _to_file(opened: OpenedCheckpoint, target: str) -> Exported:
    content = _as_in_a_file(opened)
    write_file(target, lambda file: write_torch_file(file, content))
    local = Storage(target).is_local
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(target) if local else []  # which only code rebuilds
    notes = [f"the Trainer reads {', '.join(sorted(unsafe))} with weights_only=False only"] if unsafe else []
    return Exported(target, len(opened.content["state_dict"]), notes=notes)


def _as_in_a_file(opened: OpenedCheckpoint) -> dict[str, Any]:
    """The content as a file has it: the parameters of optimizers have numbers."""
    content = dict(opened.content)
    if opened.folder is not None and "optimizer_states" in content:
        content["optimizer_states"] = [_numbered(one) for one in content["optimizer_states"]]
    return content


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with numbers of parameters in place of names, as `load_state_dict` of torch expects."""
    numbers = {name: number for number, name in enumerate(parameters_in(state))}
    without = [numbers[name] for name in state.get(WITHOUT_STATE, ()) if name in numbers]
    return {**with_keys(state, numbers), **({WITHOUT_STATE: without} if without else {})}


def _to_safetensors(opened: OpenedCheckpoint, target: str, max_shard_size: int) -> Exported:
    state = opened.content["state_dict"]
    tied = tied_in_memory(state)
    tensors = {name: one for name, one in state.items() if isinstance(one, Tensor) and name not in tied}
    with new_folder(target) as folder:
        files = write_weights(folder, tensors, max_shard_size)
    left_out = [name for name, one in state.items() if not isinstance(one, Tensor)]
    return Exported(target, len(tensors), files, left_out)


def _to_huggingface(
    opened: OpenedCheckpoint, target: str, module: str | None, config: str | None, max_shard_size: int
) -> Exported:
    stored = _stored_model(opened, module, needed=config is None)
    if config is not None:
        values, class_name = huggingface.read_config(config)
        prefix = module if module is not None else stored.get("prefix")
    else:
        values, class_name, prefix = stored["config"], stored["class"], stored["prefix"]
    model = huggingface.make_model(values, class_name)
    weights, left_out = huggingface.weights_for(model, opened.content["state_dict"], prefix)
    with new_folder(target) as folder:
        files = write_weights(folder, weights, max_shard_size)
        huggingface.save_config(model, weights, folder)
        files = sorted({*files, *os.listdir(folder)})
    return Exported(target, len(weights), files, left_out)


def _stored_model(opened: OpenedCheckpoint, module: str | None, *, needed: bool) -> Mapping[str, Any]:
    """What the checkpoint says of its model of transformers."""
    listed = None if opened.folder is None else opened.folder.manifest.about.get("huggingface")
    kinds = {"prefix": str, "class": str, "config": dict}
    models = [
        one
        for one in (listed if isinstance(listed, list) else ())
        if isinstance(one, dict) and all(isinstance(one.get(key), kind) for key, kind in kinds.items())
        and (module is None or one["prefix"] == module)
    ]  # fmt: skip
    if len(models) == 1:
        return models[0]
    if not needed:
        return {}
    if models:
        places = ", ".join(repr(one["prefix"]) for one in models)
        raise HanayoError(f"{opened.path} has several models of transformers: {places}. Say which one: --module")
    where = f" at {module!r}" if module is not None else ""
    raise HanayoError(
        f"{opened.path} doesn't say that it has a model of transformers{where}. Give the folder of its config.json: "
        f"--config DIR; or export its weights with --to safetensors"
    )


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder of safetensors, or those of the model in a checkpoint folder, by name."""

    path: Path
    folder: CheckpointFolder
    tensors: Mapping[str, StoredTensor]
    """read when they are used"""


def open_weights(path: Path) -> Weights:
    """Open a checkpoint folder, or a folder of safetensors.

    Raises:
        HanayoError: it is neither, or can't be read.
    """
    if (path / MANIFEST).is_file():
        folder = CheckpointFolder(path)
        state = folder_content(folder)["state_dict"]
        return Weights(path, folder, {name: one for name, one in state.items() if _is_stored(one)})
    folder = huggingface.SafetensorsFolder(path)
    return Weights(path, folder, {name: folder.stored(name) for name in folder.manifest.tensors})
