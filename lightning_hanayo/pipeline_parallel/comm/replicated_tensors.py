"""Gives all ranks of a group the first rank's values of tensors that any of them has changed, such as buffers.

        rank 0    rank 1    which ranks have changed it    afterwards, on both
mean    0.3       0.4       0 and 1: agreed                0.3: one broadcast of all that has changed
step    7         7         1                              7
table   ...       ...       none                           nothing is sent
"""

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.versions import identity_of


@dataclass(eq=False, repr=False)
class ReplicatedTensors:
    """Tensors that each rank of a group holds and changes by itself."""

    control: dist.ProcessGroup
    """the ranks, for CPU tensors"""
    tensors: dist.ProcessGroup
    """the same ranks, for tensors of `device`"""
    device: torch.device
    """over which values are sent"""
    _kept: Mapping[str, Tensor | None] = field(default_factory=dict, init=False)
    """as they were after the last update, so that no other tensor takes the id of one that was replaced"""
    _versions: Mapping[str, tuple[int, int]] = field(default_factory=dict, init=False)

    def update(self, own: Mapping[str, Tensor | None], changed: Collection[str] = ()) -> bool:
        """Give `own` tensors, in place, the first rank's values, where any rank has changed them since the last update.

        Called by all ranks, with the same names; in the first update all are new. `changed` names more that this rank
        has changed: a change through `.data` leaves no other trace.

        Returns:
            Whether anything had changed, which is the same on all ranks.

        Raises:
            UnsupportedError: a tensor hasn't the same shape and dtype on all ranks.
        """
        if not own:
            return False
        versions = _versions(own)
        flags = [int(name in changed or version != self._versions.get(name)) for name, version in versions.items()]
        found = self._changed_anywhere(own, flags)
        sent = [tensor for name in found if (tensor := own[name]) is not None and not tensor.is_meta]
        if sent:
            # as bytes: gloo knows neither complex numbers nor 16-bit integers
            values = [one.detach().to(self.device).contiguous().reshape(-1).view(torch.uint8) for one in sent]
            message = torch.cat(values)
            dist.broadcast(message, group=self.tensors, group_src=0)
            with torch.inference_mode():  # a tensor that an evaluation has made can be changed nowhere else
                for tensor, part in zip(sent, message.split([len(value) for value in values]), strict=True):
                    tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a copy is aligned for its dtype
        self._kept, self._versions = own, _versions(own)
        return bool(found)

    def _changed_anywhere(self, own: Mapping[str, Tensor | None], flags: list[int]) -> list[str]:
        """The names that have a flag on any rank."""
        specs = [0 if tensor is None else _code(tensor.dtype, tensor.shape) for tensor in own.values()]
        largest = torch.tensor([flags, specs, [-spec for spec in specs]])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.control)
        for (name, tensor), highest, negated_lowest in zip(own.items(), *largest[1:].tolist(), strict=True):
            if highest != -negated_lowest:
                dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
                spec = "None" if tensor is None else f"{dtype} {list(tensor.shape)}"
                raise UnsupportedError(
                    f"{name} is a buffer ({spec} on this rank) whose shape or dtype differs between data ranks, which "
                    f"take the values of rank 0, as with DDP. Make it the same on all, or keep it in an attribute that "
                    f"is no buffer."
                )
        return [name for name, flag in zip(own, largest[0].tolist(), strict=True) if flag]


def _versions(tensors: Mapping[str, Tensor | None]) -> dict[str, tuple[int, int]]:
    return {name: identity_of(tensor) for name, tensor in tensors.items()}


@cache
def _code(dtype: torch.dtype, shape: torch.Size) -> int:
    """A number for dtype and shape, the same on all ranks."""
    return zlib.crc32(f"{dtype} {list(shape)}".encode())
