"""Writes the file that `torch.save` would write, one tensor at a time, so that no two of them are in memory at once.

archive/data.pkl     the objects; in place of a tensor's values it has the number of a record
archive/data/0       the bytes of the first tensor, at a multiple of 64 bytes, so that the file can be mapped
archive/data/1       ...
archive/version
"""

import io
import pickle
import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO
from zipfile import ZipFile, ZipInfo

import torch
from torch import Tensor

from lightning_hanayo.checkpoint.format.tensor_file import bytes_of

_ALIGNMENT = 64
_HEADER_BYTES = 30
_SIZES_BYTES = 20
"""of a record that may be larger than 4 GB: its sizes in 64 bits"""
_PADDING = 0x4246
"""marks a part of a record's header that says nothing; the same that torch uses"""
_CHUNK = 8 * 2**20


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
    with ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", text.getvalue())
        archive.writestr("archive/byteorder", b"little")
        for number, tensor in enumerate(pickler.tensors):
            _write_record(archive, file, f"archive/data/{number}", bytes_of(tensor))
        archive.writestr("archive/version", b"3\n")


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
        values = _Values(len(self.tensors) - 1, value.numel() * value.element_size())
        stride = torch.empty(value.shape, device="meta").stride()
        hooks: OrderedDict[int, object] = OrderedDict()
        return torch._utils._rebuild_tensor_v3, (values, 0, tuple(value.shape), stride, False, hooks, value.dtype)

    def persistent_id(self, value: Any) -> Any:
        """Where `torch.load` finds the values of a tensor."""
        if not isinstance(value, _Values):
            return None
        return ("storage", torch.UntypedStorage, str(value.number), "cpu", value.num_bytes)


def _write_record(archive: ZipFile, file: BinaryIO, name: str, data: memoryview) -> None:
    """Write a record whose data begin at a multiple of the alignment."""
    record = ZipInfo(name)
    record.file_size = len(data)
    start = file.tell() + _HEADER_BYTES + len(name) + _SIZES_BYTES + 4
    record.extra = struct.pack("<HH", _PADDING, -start % _ALIGNMENT) + b"\0" * (-start % _ALIGNMENT)
    with archive.open(record, "w", force_zip64=True) as opened:
        for position in range(0, len(data), _CHUNK):
            opened.write(data[position : position + _CHUNK])
