"""Writes safetensors files, one tensor after another, hashing what it writes.

Copies a region of a tensor out of the parts that it is stored in.

parts     0 0 0 1 1 1       Columns 1 to 3 are wanted: two from part 0, one from part 1. Of each part, the bytes from
          0 0 0 1 1 1       its first to its last wanted row are asked for, and the wanted columns of these are
            [ - ]           copied. Of a file that is mapped into memory no other pages are read.

A tensor whose values are in a checkpoint, as user code sees it: they are read when something computes with them.

    v = checkpoint["state_dict"]["head.weight"]         nothing is read
    v.shape, v.dtype, v.detach(), copy.deepcopy(v)      nothing is read
    v.norm(), v[:10], parameter.copy_(v)                the whole tensor is read, and freed afterwards
    v.mul_(2)                                           the whole tensor is read, and kept: it has other values now

So a hook may filter, rename and copy the entries of a state dict on every rank, and each rank reads only its own part.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from xxhash import xxh3_128

from lightning_hanayo.dist_checkpointing.format import StoredFile, StoredPart, WholeTensor, make_header
from lightning_hanayo.dist_checkpointing.region import Overlap, Region
from lightning_hanayo.errors import CheckpointError
from lightning_hanayo.packed_values import is_tensor_subclass
from lightning_hanayo.partial_values import METADATA, OF_DEVICE, in_place_target, name_of, of_device

_CHUNK = 4 * 2**20
"""bytes that are hashed and written at once, so that they are still in the processor's cache"""
DTYPES = {
    "C128": torch.complex128, "C64": torch.complex64,
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
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
        data, hashed = bytes_of(tensors[key]), xxh3_128()
        for start in range(0, len(data), _CHUNK):
            check()
            chunk = data[start : start + _CHUNK]
            hashed.update(chunk)
            file.write(chunk)
        hashes[key], num_bytes = hashed.hexdigest(), num_bytes + len(data)
        data = chunk = memoryview(b"")  # freed before the next one is read
    return StoredFile(num_bytes, xxh3_128(header).hexdigest()), hashes


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns a tensor's entries one after another, in host memory."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    host = plain.to("cpu", memory_format=torch.contiguous_format).contiguous().reshape(-1)
    return host.view(torch.uint8).numpy().data if host.numel() else memoryview(b"")


PartBytes = Callable[[StoredPart, int, int], memoryview]
"""returns the bytes of a part from one position to another one"""
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""what is copied for an entry of so many bytes: NumPy doesn't know all of torch's dtypes"""


def read_region(tensor: WholeTensor, wanted: Region, part_bytes: PartBytes) -> Tensor:
    """Returns the wanted entries of a stored tensor, on the CPU.

    Args:
        wanted: the result has them in the same order. No entry may be wanted twice.
        part_bytes: is called for each part that has some of them.

    Raises:
        IndexError: the tensor doesn't have all of these entries.
    """
    result = torch.empty(wanted.shape, dtype=DTYPES[tensor.dtype])
    target = result.view(_UNITS[result.itemsize]).numpy()
    overlaps = [(part, part.region.overlap(wanted)) for part in tensor.parts if part.region.num_entries]
    num_copied = sum(_copy(part, overlap, target, part_bytes) for part, overlap in overlaps if overlap is not None)
    if num_copied != wanted.num_entries:
        raise IndexError(f"{wanted} isn't in a tensor of the shape {tensor.shape}")
    return result


def _copy(
    part: StoredPart, overlap: Sequence[Sequence[Overlap]], target: np.ndarray[Any, Any], part_bytes: PartBytes
) -> int:
    """Copy what is wanted of a part, and return how many entries that is."""
    first, num_rows = _rows(overlap)
    row_bytes = math.prod(part.region.shape[1:]) * target.itemsize
    data = part_bytes(part, first * row_bytes, (first + num_rows) * row_bytes)
    source = np.frombuffer(data, target.dtype).reshape((num_rows, *part.region.shape[1:]) if overlap else ())
    for pieces in product(*overlap):
        starts = [piece.source for piece in pieces]
        if starts:
            starts[0] -= first
        lengths = [piece.length for piece in pieces]
        target[_slices([piece.target for piece in pieces], lengths)] = source[_slices(starts, lengths)]
    return math.prod(sum(piece.length for piece in pieces) for pieces in overlap)


def _rows(overlap: Sequence[Sequence[Overlap]]) -> tuple[int, int]:
    """Where the wanted indices of the first dimension begin, and how many there are up to the last one."""
    if not overlap:
        return 0, 1
    first = min(piece.source for piece in overlap[0])
    return first, max(piece.source + piece.length for piece in overlap[0]) - first


def _slices(starts: Iterable[int], lengths: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))


Read = Callable[[Region | None], Tensor]
"""reads a region of a tensor, all of it if None, into memory of its own"""

_ALIASES = frozenset(("detach", "data", "cpu", "contiguous"))
"""what returns the same values in the same memory, of a tensor that lies in host memory in its own order"""


class StoredTensor(Tensor):
    """Has the shape and the dtype of a stored tensor; `read` gets its values."""

    _read: Read
    _changed: Tensor | None = None
    """the values, once user code has changed them"""

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, read: Read) -> "StoredTensor":
        """A tensor of this shape, which `read` reads."""
        made: StoredTensor = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(StoredTensor)
        made._read = read
        return made

    @staticmethod
    def around(tensor: Tensor) -> "StoredTensor":
        """A tensor that is in memory, or in a mapped file, as one that is read when it is used."""
        if isinstance(tensor, StoredTensor):
            return tensor
        return StoredTensor.of(tensor.shape, tensor.dtype, lambda region: _taken(tensor, region))

    def read(self, region: Region | None = None) -> Tensor:
        """Return a region of the values, all of them if None, in memory of its own."""
        if self._changed is None:
            return self._read(region)
        return self._changed.clone() if region is None else _taken(self._changed, region)

    def part(self, region: Region) -> "StoredTensor":
        """A region of it, which isn't read yet."""

        def read(inner: Region | None) -> Tensor:
            values = self.read(region)
            return values if inner is None else _taken(values, inner)

        return StoredTensor.of(region.shape, self.dtype, read)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no values; read all values for anything else."""
        name, kwargs = name_of(func, args, kwargs), kwargs or {}
        if name in OF_DEVICE:
            return of_device(func, args, kwargs, torch.device("cpu"))
        if name in _ALIASES:
            return args[0]
        if name == "requires_grad_":  # of nn.Parameter(tensor), too
            with torch._C.DisableTorchFunctionSubclass():
                torch.utils.swap_tensors(args[0], nn.Parameter(args[0].read(), *args[1:], **kwargs))  # type: ignore[no-untyped-call]
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            if name in METADATA:
                return func(*args, **kwargs)
            target = in_place_target(name, args, kwargs)
            if isinstance(target, StoredTensor):
                target._changed = target.read()
            args, kwargs = tree_map(_with_values, (args, kwargs))
            result = func(*args, **kwargs)
        return target if isinstance(target, StoredTensor) else result

    def __deepcopy__(self, memo: dict[int, Any]) -> "StoredTensor":
        """A copy isn't read either."""
        memo[id(self)] = copied = StoredTensor.of(self.shape, self.dtype, self._read)
        copied._changed = None if self._changed is None else self._changed.clone()
        return copied

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        """Say what it is, without reading it."""
        return f"<{tuple(self.shape)} in {self.dtype}, not read from its checkpoint yet>"


def _with_values(leaf: Any) -> Any:
    if not isinstance(leaf, StoredTensor):
        return leaf
    return leaf.read() if leaf._changed is None else leaf._changed


def _taken(whole: Tensor, region: Region | None) -> Tensor:
    """A region of a tensor, in memory of its own."""
    part = whole
    for dim, runs in enumerate(region.runs if region is not None else ()):
        pieces = [part.narrow(dim, start, stop - start) for start, stop in runs or ((0, 0),)]
        part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return part.clone(memory_format=torch.contiguous_format)
