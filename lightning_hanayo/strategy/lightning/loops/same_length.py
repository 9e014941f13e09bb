"""Data ranks agree how many training batches an epoch has: as many as the one with the fewest.

data rank 0    b0  b1  b2  b3  b4       lengths known: 5 and 3, agreed before training
data rank 1    b0  b1  b2               unknown: "I have one more" before each batch, until one has none
both           b0  b1  b2  end
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from lightning_hanayo.runtime.comm.object_collectives import all_gather_objects

_ADVICE = (
    "Gradients are averaged over all data ranks, so all end the epoch there, and the rest is left out. Give all data "
    "ranks the same number of batches (a DistributedSampler, drop_last=True) to use all."
)


class SameLength:
    """One data rank's side of the agreement for one training loader. Called by all of them.

    Args:
        own: the number of this rank's batches; None: not known.
        is_certain: whether the loader surely gives as many.
        get_group: returns the data ranks with this rank's place, over gloo. No group is kept: it would outlive a
            failure.
    """

    def __init__(self, own: int | None, is_certain: bool, get_group: Callable[[], dist.ProcessGroup]) -> None:
        self._get_group = get_group
        found = all_gather_objects(get_group(), (own, is_certain))
        lengths = [length for length, _ in found if length is not None]
        self.length = min(lengths) if len(lengths) == len(found) else None
        """the number of batches on all data ranks; None if one of them doesn't know its own"""
        self.is_certain = all(certain for _, certain in found)
        """whether each data rank surely has as many"""
        if self.length is not None:
            _warn(lengths)

    def all_have_one_more(self, has_one: bool, num_read: int) -> bool:
        """Whether all data ranks have a batch, after `num_read` that all had. Waits for the slowest of them."""
        have_one = torch.tensor(int(has_one))
        dist.all_reduce(have_one, dist.ReduceOp.MIN, self._get_group())
        if not have_one:
            _warn([num_read + int(one) for one in all_gather_objects(self._get_group(), has_one)], or_more=True)
        return bool(have_one)


def _warn(lengths: list[int], *, or_more: bool = False) -> None:
    """Say which data rank has the fewest batches, if not all have as many."""
    fewest, most = min(lengths), max(lengths)
    if fewest < most:
        others = f"{most} or more" if or_more else f"up to {most}"
        rank_zero_warn(
            f"Data rank {lengths.index(fewest)} has {fewest} training batches in this epoch, other data ranks have "
            f"{others}. {_ADVICE}"
        )
