"""Compares hashes of parameters between the ranks that must hold equal ones, every so many optimizer steps.

              data 0    data 1               in a cube also the ranks that hold the same part
stage 0       3f a2     3f a2    equal
stage 1       77 b1     77 c9    differ: all ranks fail with an error that names the parameter and the ranks

A hash is a sum of the bits of all elements, as integers, each times an odd number that depends on its place. It is
computed where the parameter is, and only the sums come to the host.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.errors import ReplicasDifferError
from lightning_hanayo.packed_values import stored_tensors
from lightning_hanayo.runtime.comm.object_collectives import all_gather_objects

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x1E3779B97F4A7C15
_CHUNK, _CHUNK_ON_DEVICE = 2**16, 2**22
"""elements that are read as 64-bit integers at a time: on a CPU few enough for its cache"""
Key = tuple[str, str]
"""a parameter's name, and which part of it"""


class ReplicaCheck:
    """One rank's part in it. Its methods are called by all ranks.

    Args:
        every: how many optimizer steps there are from one comparison to the next; None: it is never done.
        parameters: those that this rank holds, by name and part.
        groups: gloo groups whose ranks must have equal values under equal names and parts.
        stage_of: the stage of a parameter, by its name.
        place_of: where a rank is, for messages.
    """

    def __init__(
        self,
        every: int | None,
        parameters: Mapping[Key, nn.Parameter],
        groups: Sequence[dist.ProcessGroup],
        stage_of: Callable[[str], int],
        place_of: Callable[[int], str],
    ) -> None:
        self._every = every
        self._parameters = dict(parameters)
        self._groups = list(groups)
        self._stage_of = stage_of
        self._place_of = place_of
        self._last = 0

    def after(self, step: int) -> None:
        """Compare, if it is time after `step` optimizer steps.

        Raises:
            ReplicasDifferError: a parameter isn't the same on all ranks that hold it.
        """
        if self._every is None or step % self._every or step == self._last or not self._groups:
            return
        self._last = step
        hashes = hashes_of(self._parameters)
        for group in self._groups:
            found = all_gather_objects(group, (dist.get_rank(), hashes))
            differing = first_difference(found)
            if differing is not None:
                raise ReplicasDifferError(self._message(step, *differing))

    def close(self) -> None:
        """Forget the other ranks: the run has ended."""
        self._groups.clear()

    def _message(self, step: int, name: str, ranks_by_hash: Mapping[int, Sequence[int]]) -> str:
        held = "; ".join(
            f"{value % 2**64:016x} on {' and '.join(f'rank {rank} ({self._place_of(rank)})' for rank in ranks)}"
            for value, ranks in ranks_by_hash.items()
        )
        return (
            f"after optimizer step {step} the copies of {name} (stage {self._stage_of(name)}) differ. Their hashes are "
            f"{held}. Ranks that hold the same parameter must update it alike: look for code that changes weights or "
            f"gradients on some ranks only, or with random numbers of its own, and for a faulty device. Go on from a "
            f"checkpoint that is older than the difference."
        )


def first_difference(found: Sequence[tuple[int, Mapping[Key, int]]]) -> tuple[str, dict[int, list[int]]] | None:
    """The first parameter whose hashes differ among ranks, and the ranks of each hash; None if there is none."""
    ranks: dict[Key, dict[int, list[int]]] = defaultdict(dict)
    for rank, hashes in found:
        for key, value in hashes.items():
            ranks[key].setdefault(value, []).append(rank)
    return next(((name, held) for (name, _), held in ranks.items() if len(held) > 1), None)


def hashes_of(parameters: Mapping[Key, nn.Parameter]) -> dict[Key, int]:
    """The hash of each parameter. The host waits for the device once."""
    if not parameters:
        return {}
    values = torch.stack([_hash(parameter) for parameter in parameters.values()]).tolist()
    return dict(zip(parameters, values, strict=True))


def _hash(parameter: nn.Parameter) -> Tensor:
    """[], in int64, on the parameter's device."""
    total = torch.zeros((), dtype=torch.int64, device=parameter.device)
    for tensor in (one for one in stored_tensors(parameter) if one.numel()):
        for bits in _bits(tensor.detach()).split(_CHUNK if total.device.type == "cpu" else _CHUNK_ON_DEVICE):
            numbers = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
            total = total * _ODD + (bits.long() * numbers.mul_(_ODD)).sum()
    return total


def _bits(tensor: Tensor) -> Tensor:
    real: Any = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).view(_BITS[real.element_size()])  # type: ignore[no-any-return]
