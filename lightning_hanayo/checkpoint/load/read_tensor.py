"""Copies a region of a tensor out of the parts that it is stored in.

parts     0 0 0 1 1 1       Columns 1 to 3 are wanted: two from part 0, one from part 1. Of each part, the bytes from
          0 0 0 1 1 1       its first to its last wanted row are asked for, and the wanted columns of these are
            [ - ]           copied. Of a file that is mapped into memory no other pages are read.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hanayo.checkpoint.format.region import Overlap, Region
from lightning_hanayo.checkpoint.format.stored import StoredPart, WholeTensor
from lightning_hanayo.checkpoint.format.tensor_file import dtype_named

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
    result = torch.empty(wanted.shape, dtype=dtype_named(tensor.dtype))
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
