"""Writes tensors to safetensors files in Hugging Face's layout: one file, or several of a limited size with an index.

folder/model.safetensors       or       folder/model.safetensors.index.json      {"weight_map": {name: file}}
                                        folder/model-00001-of-00002.safetensors
                                        folder/model-00002-of-00002.safetensors
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from lightning_hanayo.checkpoint.format.storage import LocalStorage, Storage
from lightning_hanayo.checkpoint.format.tensor_file import write_tensors
from lightning_hanayo.errors import HanayoError, writing

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
    storage = LocalStorage(str(folder))
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        many = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        with storage.create(f"{_STEM}{many}{_ENDING}") as file:
            write_tensors(file, {name: tensors[name] for name in names})
        files |= dict.fromkeys(names, f"{_STEM}{many}{_ENDING}")
    written = sorted(set(files.values()))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_num_bytes, tensors.values()))}, "weight_map": files}
        written.append(f"{_STEM}{_ENDING}.index.json")
        with storage.create(written[-1]) as file:
            file.write((json.dumps(index, indent=2) + "\n").encode())
    return written


def check_free(path: str) -> None:
    """Raises a HanayoError if there is something at a path, local or remote; an empty folder is nothing."""
    storage = Storage.of(path)
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
            LocalStorage(str(temporary)).rename(str(target))
        finally:
            if temporary.exists():
                shutil.rmtree(temporary)


def _shards(tensors: Mapping[str, Tensor], most: int) -> Iterator[list[str]]:
    """Names for one file after another."""
    shard: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if shard and size + _num_bytes(tensor) > most:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += _num_bytes(tensor)
    yield shard


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
