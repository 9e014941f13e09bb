"""Reads tensors out of a folder of safetensors files, in Hugging Face's layout.

folder/model.safetensors       or       folder/model.safetensors.index.json      {"weight_map": {name: file}}
                                        folder/model-00001-of-00002.safetensors
                                        folder/model-00002-of-00002.safetensors

Files are mapped into memory: only what is copied out of a tensor is read, in pages of the operating system.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_hanayo.errors import HanayoError, UnsupportedError

_FILE = "model.safetensors"
_INDEX = f"{_FILE}.index.json"
_SAMPLE = 8
"""values of each tensor that a signature takes"""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of a tensor. `dtype` is None for one that torch or this package doesn't know."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    dtype_name: str


class SafetensorsFolder:
    """A folder whose headers were read and checked.

    Example:
        >>> folder = SafetensorsFolder(Path("gpt2"))
        >>> for name, whole in folder.mapped(["wte.weight"]):
        ...     rows = whole[:100].clone()  # reads 100 rows

    Raises:
        HanayoError: there is no such folder, it has no safetensors, or a file is missing, damaged or truncated.
        UnsupportedError: it has weights in another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = dict(_stored_tensors(path))

    @cached_property
    def signature(self) -> str:
        """The same on all ranks that see the same tensors: of their names, shapes and dtypes, and first few values.

        So it differs between two states of one training, and reads one page for each tensor.
        """
        known = [name for name, one in self.tensors.items() if one.dtype is not None]
        first = {name: whole.reshape(-1)[:_SAMPLE].tolist() for name, whole in self.mapped(known)}
        headers = sorted((name, one.shape, one.dtype_name) for name, one in self.tensors.items())
        return sha256(repr((headers, sorted(first.items()))).encode()).hexdigest()

    def mapped(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, file after file. They are read where they are copied, and must not be written to.

        Raises:
            HanayoError: a file can't be read any more.
        """
        by_file = defaultdict(list)
        for name in names:
            by_file[self.tensors[name].file].append(name)
        for file, wanted in by_file.items():
            with _readable(file), safe_open(file, framework="pt") as opened:
                for name in wanted:
                    yield name, opened.get_tensor(name)


def _stored_tensors(path: Path) -> Iterator[tuple[str, TensorHeader]]:
    if (path / _INDEX).is_file():
        for file, names in _files_of_index(path).items():
            yield from _header(file, names)
    elif (path / _FILE).is_file():
        yield from _header(path / _FILE, None)
    else:
        _refuse(path)


def _files_of_index(path: Path) -> Mapping[Path, list[str]]:
    files = defaultdict(list)
    with _readable(path / _INDEX):
        for name, file in json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"].items():
            files[path / file].append(name)
    return files


def _header(file: Path, names: Iterable[str] | None) -> Iterator[tuple[str, TensorHeader]]:
    """Read the header of one file, which must have all `names`."""
    with _readable(file), safe_open(file, framework="pt") as opened:
        found = list(opened.keys())
        missing = [name for name in names or () if name not in set(found)]
        if missing:
            raise HanayoError(f"{file} has no tensor {missing[0]}, which {_INDEX} expects there. Download it again.")
        for name in found if names is None else names:
            part = opened.get_slice(name)
            dtype_name = part.get_dtype()
            yield name, TensorHeader(file, tuple(part.get_shape()), _DTYPES.get(dtype_name), dtype_name)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise HanayoError(
            f"{file} can't be read: {error}. It is missing, damaged or truncated; download or save it again."
        ) from error


def _refuse(path: Path) -> None:
    if not path.is_dir():
        raise HanayoError(
            f"init_from: there is no folder {path}. Give one with {_FILE}, on a file system that all ranks see. To get "
            f"it from Hugging Face: huggingface_hub.snapshot_download(name)."
        )
    found = sorted(file.name for file in path.iterdir())
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")) for name in found):
        raise UnsupportedError(
            f"init_from: {path} has no safetensors, but other files ({', '.join(found)}). Convert them once, with the "
            f"model's own class: GPT2LMHeadModel.from_pretrained(folder).save_pretrained(new_folder), with "
            f"safe_serialization=True before version 5 of transformers."
        )
    raise HanayoError(
        f"init_from: {path} has neither {_FILE} nor {_INDEX}, but {', '.join(found) or 'no files'}. Save a model "
        f"there: model.save_pretrained(folder), or safetensors.torch.save_model(model, folder + '/{_FILE}')."
    )
