"""What one rank writes of a checkpoint: its tensors, its JSON documents, and rank 0 what the manifest says of all.

The ranks that write a checkpoint together, and the collectives that they need.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.pipeline_parallel.comm.object_collectives import all_gather_objects, gather_objects

Kind = Literal["model", "optimizer", "state"]
"""which of a rank's files a tensor is in"""


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor of the single-process model, or all of it.

    Example:
        >>> rows = torch.randn(2, 8)  # rows 2 and 3 of a weight [4, 8]
        >>> TensorPart("model/head.weight", rows, (4, 8), Region((((2, 4),), ((0, 8),))), "model")
    """

    name: str
    """as in the manifest: model/<name>, optimizer/<i>/<parameter>/<key>, gradient/<parameter>, or state/<n>"""
    tensor: Tensor
    """[region.shape], on any device"""
    shape: tuple[int, ...]
    """of the whole tensor"""
    region: Region
    """the entries of the whole that `tensor` holds, in its order"""
    kind: Kind

    @staticmethod
    def whole(name: str, tensor: Tensor, kind: Kind) -> "TensorPart":
        """A tensor that one rank writes alone."""
        return TensorPart(name, tensor, tuple(tensor.shape), Region.whole(tensor.shape), kind)


@dataclass(frozen=True)
class RankPart:
    """What one rank writes. It belongs to the save: only the tensors may change once `Saver.save` has returned.

    No two ranks have the same entries of a tensor, nor documents of the same stem.
    """

    tensors: Sequence[TensorPart] = ()
    texts: Mapping[str, Any] = field(default_factory=dict)
    """JSON documents by the stem of their file: "state", "state-data-00001" """
    about: Mapping[str, Any] = field(default_factory=dict)
    """rank 0's: step, epoch, layout, and what else the manifest says of the whole checkpoint"""


ANOTHER_ENDED = "another rank has ended, or doesn't answer"

_T = TypeVar("_T")


class RanksLost(RuntimeError):
    """A collective has failed: another rank has ended, or doesn't answer. The message is the group's own."""


class SavingRanks:
    """All ranks of the world, seen from one of them. Calls are made by all ranks, in the same order, in one thread.

    Args:
        group: over gloo, and used by nothing else at the same time; None for one process alone.

    Raises:
        RanksLost: by all collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._group = group

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order."""
        return self._call(all_gather_objects, value) if self.num_ranks > 1 else [value]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` on rank 0, and nothing on the others."""
        return self._call(gather_objects, value) if self.num_ranks > 1 else [value]

    def largest(self, number: int) -> int:
        """Return the largest number of all ranks. Cheap enough for each batch: one all-reduce of eight bytes."""

        def reduced(group: dist.ProcessGroup, value: int) -> int:
            largest = torch.tensor(value)  # in host memory
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            return int(largest)

        return self._call(reduced, number) if self.num_ranks > 1 else number

    def close(self) -> None:
        """Let go of the process group: ranks that wait for this one are woken once nobody holds it."""
        self._group = None

    def _call(self, collective: Callable[[dist.ProcessGroup, Any], _T], value: Any) -> _T:
        if self._group is None:
            raise RanksLost("the run has been abandoned")
        try:
            return collective(self._group, value)
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed meanwhile
            raise RanksLost(str(error).partition("\n")[0]) from error
