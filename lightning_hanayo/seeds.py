"""Makes seeds from keys, the same in every process, and finds the generators to seed."""

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def seed_of(*key: object) -> int:
    """A 64-bit seed that depends only on the key: on the text of its parts.

    Example:
        >>> seed_of("train", 3, 0) == seed_of("train", 3, 0) != seed_of("train", 30)
        True
    """
    return int.from_bytes(blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest(), "big")


def mix(seed: int, index: int) -> int:
    """A 64-bit seed for each `index`; neighbouring ones are unrelated (splitmix64; Steele, Lea, Flood, OOPSLA 2014)."""
    value = (seed + (index + 1) * _GOLDEN) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor & _MASK
    return value ^ (value >> 31)


def default_generator(device: "torch.device") -> "torch.Generator":
    """Torch's own generator of `device`, used by `torch.rand(..., device=device)` and by dropout there."""
    import torch

    if device.type == "cpu":
        return torch.default_generator
    backend: Any = getattr(torch, device.type)
    backend.init()  # it has no generators before
    generators: tuple[torch.Generator, ...] = backend.default_generators
    return generators[device.index or 0]
