"""Writes safetensors files, one tensor after another, hashing what it writes."""

from collections.abc import Callable, Mapping
from typing import BinaryIO

import torch
from torch import Tensor
from xxhash import xxh3_128

from lightning_hanayo.dist_checkpointing.format import StoredFile, make_header
from lightning_hanayo.errors import CheckpointError
from lightning_hanayo.packed_values import is_tensor_subclass

_CHUNK = 4 * 2**20
"""bytes that are hashed and written at once, so that they are still in the processor's cache"""
DTYPES = {
    "C128": torch.complex128,
    "C64": torch.complex64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""by the names that safetensors and manifests give them"""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(tensor: Tensor, name: str) -> str:
    """Returns what safetensors and manifests call the dtype of a tensor with this name.

    Raises:
        CheckpointError: the format has no such tensors.
    """
    is_plain = tensor.layout is torch.strided and not is_tensor_subclass(tensor)
    if not is_plain or tensor.dtype not in _NAMES:
        kind = f"{tensor.dtype}" if is_plain else f"a {type(tensor).__name__} in {tensor.dtype}, {tensor.layout}"
        raise CheckpointError(
            f"The tensor {name} ({kind}) can't be stored in a checkpoint folder. Save with "
            f"HanayoStrategy(save_full=True), or convert it in on_save_checkpoint."
        )
    return _NAMES[tensor.dtype]


def write_tensors(
    file: BinaryIO,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    check: Callable[[], object] = int,
) -> tuple[StoredFile, dict[str, str]]:
    """Write a safetensors file. No more than one tensor at a time is copied into host memory.

    Args:
        file: open for writing, at its beginning.
        tensors: by key, on any device. They are written in order of falling element size, so that each is aligned. A
            `StoredTensor` is read when it is written.
        metadata: texts for the header. Default: {"format": "pt"}, which Hugging Face's libraries expect.
        check: is called before each piece; what it raises ends the writing.

    Example:
        >>> with open("model.safetensors", "wb") as file:
        ...     stored, hashes = write_tensors(file, model.state_dict())

    Returns:
        What a manifest says of the file, and the hash of each tensor's bytes, by key.

    Raises:
        CheckpointError: a tensor's dtype or layout can't be stored. Nothing was written then.
        OSError: the file can't be written.
    """
    keys = sorted(tensors, key=lambda key: -tensors[key].element_size())
    stored = {key: (dtype_name(tensors[key], key), tuple(tensors[key].shape)) for key in keys}
    header = make_header(stored, {"format": "pt"} if metadata is None else metadata)
    file.write(header)
    num_bytes, hashes = len(header), {}
    for key in keys:
        hashes[key], length = _write(file, tensors[key], check)
        num_bytes += length
    return StoredFile(num_bytes, xxh3_128(header).hexdigest()), hashes


def _write(file: BinaryIO, tensor: Tensor, check: Callable[[], object]) -> tuple[str, int]:
    """Write a tensor, and return the hash and the number of its bytes."""
    data = bytes_of(tensor)
    hashed = xxh3_128()
    for start in range(0, len(data), _CHUNK):
        check()
        chunk = data[start : start + _CHUNK]
        hashed.update(chunk)
        file.write(chunk)
    return hashed.hexdigest(), len(data)


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns a tensor's entries one after another, in host memory."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    host = plain.to("cpu", memory_format=torch.contiguous_format).contiguous().reshape(-1)
    return host.view(torch.uint8).numpy().data if host.numel() else memoryview(b"")
