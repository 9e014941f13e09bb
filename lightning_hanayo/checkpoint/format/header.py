"""Makes and checks the header of a safetensors file: which bytes of it are which tensor.

8 bytes    length of the header, little-endian
header     {"__metadata__": {...}, "<key>": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
           as JSON, filled up with spaces to a multiple of 8 bytes
data       one tensor after another, without gaps
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

ITEM_BYTES = {
    "C128": 16,  # not in safetensors: stored as F64, with one dimension more
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""bytes per entry, by the names that safetensors gives dtypes"""
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""the limit of the safetensors library"""


class InvalidHeader(ValueError):
    """A header that says something impossible; the message says what."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. `start` and `stop` count from the file's beginning, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def stored_as(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and shape under which a file has a tensor: for C128 those of its real and imaginary parts."""
    return ("F64", (*shape, 2)) if dtype == "C128" else (dtype, tuple(shape))


def make_header(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Returns the first bytes of a file with these tensors (dtype and shape by key), which follow in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, (dtype, shape) in tensors.items():
        dtype, shape = stored_as(dtype, shape)
        end = offset + ITEM_BYTES[dtype] * math.prod(shape)
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


def header_length(first: bytes | memoryview, num_bytes: int) -> int:
    """Returns how many bytes of a file of `num_bytes` come before its data, by its first 8 bytes.

    Raises:
        InvalidHeader: the file or the library's limit is shorter.
    """
    length = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "little")
    if len(first) < LENGTH_BYTES or length > min(num_bytes, MAX_HEADER_BYTES):
        raise InvalidHeader(f"a header of {length} bytes is announced, and the file has {num_bytes}")
    return length


def read_header(data: bytes | memoryview, num_bytes: int) -> dict[str, Entry]:
    """Returns the tensors of a file by key, from its bytes up to where the data begins.

    Args:
        data: as long as `header_length` says.
        num_bytes: of the whole file.

    Raises:
        InvalidHeader: it isn't a header, or the tensors don't fill the file from its header to its end.
    """
    try:
        header = json.loads(bytes(data[LENGTH_BYTES:]))
    except (ValueError, RecursionError) as error:
        raise InvalidHeader(f"it is no JSON: {type(error).__name__}") from None
    if not isinstance(header, dict):
        raise InvalidHeader("it is no JSON object")
    header.pop("__metadata__", None)
    entries = {key: _entry(key, value, len(data)) for key, value in header.items()}
    in_order = sorted((entry.start, entry.stop) for entry in entries.values())
    borders = [(len(data), len(data)), *in_order, (num_bytes, num_bytes)]
    if any(before[1] != after[0] for before, after in pairwise(borders)):
        raise InvalidHeader("its tensors overlap, or leave gaps")
    return entries


def _entry(key: str, value: Any, data_start: int) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            valid = dtype in ITEM_BYTES and all(type(size) is int and size >= 0 for size in shape)
            if valid and start >= 0 and stop - start == ITEM_BYTES[dtype] * math.prod(shape):
                return Entry(dtype, tuple(shape), data_start + start, data_start + stop)
    raise InvalidHeader(f"the tensor {key!r} is impossible")
