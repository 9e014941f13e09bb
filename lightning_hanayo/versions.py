"""Tells whether a tensor is the same one as before, with the same values: by its identity and version, or by a hash."""

from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.packed_values import stored_tensors

_version = attrgetter("_version")


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 for one made in inference mode, which doesn't count."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Collection[Tensor]) -> list[int]:
    """The versions of many tensors: 30 ns for each, unless some were made in inference mode."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


def identity_of(tensor: Tensor | None) -> tuple[int, int]:
    """Which tensor it is, and its version. Keep the tensor alive meanwhile, so that no other one takes its id."""
    return (0, 0) if tensor is None else (id(tensor), version_of(tensor))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x1E3779B97F4A7C15
_CHUNK, _CHUNK_ON_DEVICE = 2**16, 2**22
"""elements that are read as 64-bit integers at a time: on a CPU few enough for its cache"""


def hashes_of(tensors: Iterable[Tensor]) -> list[int]:
    """The hashes of tensors that aren't on meta, each computed where it is. The host waits for the device once."""
    hashes = [_hash(tensor) for tensor in tensors]
    return torch.stack([one.to(hashes[0].device) for one in hashes]).tolist() if hashes else []


def _hash(tensor: Tensor) -> Tensor:
    """The sum of the bits of all elements as integers, each times an odd number that depends on its place.

    [], in int64, on the tensor's device: only this sum comes to the host.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for stored in (one.detach() for one in stored_tensors(tensor) if one.numel()):
        plain = stored.int_repr() if stored.is_quantized else stored.resolve_conj()
        real: Any = torch.view_as_real(plain) if plain.is_complex() else plain
        integers = real.reshape(-1).view(_BITS[real.element_size()])
        for bits in integers.split(_CHUNK if total.device.type == "cpu" else _CHUNK_ON_DEVICE):
            numbers = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
            total = total * _ODD + (bits.long() * numbers.mul_(_ODD)).sum()
    return total
