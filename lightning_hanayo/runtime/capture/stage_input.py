"""The cargo: what travels down the stack of blocks with one micro-batch.

    carry    the last block's output                            a tree
    calls    the distinct calls of the blocks still to come     (args, kwargs) with holes where the carry goes
    which    for each block still to come, its call             indices into `calls`
    sequence_length   of the whole sequences; 0 where no block uses it

A mask that all blocks get is one tensor in one call; Gemma's two kinds of masks are two calls.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from torch import Tensor, nn

from lightning_hanayo.runtime.capture.proxy import pick
from lightning_hanayo.runtime.comm.message import Message
from lightning_hanayo.runtime.comm.pytree import Flattener, Skeleton, places, renumber, unflatten

NOTHING: Skeleton = ("plain", "NoneType", None)


@dataclass(frozen=True)
class StageInput:
    """A packet, read as carry and calls."""

    carry: Skeleton
    calls: tuple[Skeleton, ...]
    which: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    sequence_length: int = 0

    @staticmethod
    def of(packet: Message) -> "StageInput":
        """The cargo that `packet` holds."""
        carry, calls, which, sequence_length = packet.skeleton
        return StageInput(carry, calls, which, packet.tensors, sequence_length)

    @property
    def packet(self) -> Message:
        """As a packet, with the tensors it really uses, each once."""
        skeleton, used = _used(self.carry, self.calls, self.which, self.sequence_length)
        return Message(skeleton, tuple(self.tensors[place] for place in used))

    @property
    def output(self) -> Any:
        """The carry as a tree: after the last block, the output of the stack."""
        return unflatten(self.carry, self.tensors)

    def through(self, blocks: list[nn.Module]) -> "StageInput":
        """The cargo behind `blocks`, which are the next ones in the stack."""
        output = self.output
        for block, which in zip(blocks, self.which, strict=False):
            args, kwargs = unflatten(self.calls[which], self.tensors, partial(pick, output))
            output = block(*args, **kwargs)
        return self.behind(output, len(blocks)) if blocks else self

    def behind(self, output: Any, num_blocks: int) -> "StageInput":
        """The cargo behind the next `num_blocks`, whose last one returned `output`."""
        which = self.which[num_blocks:]
        flattener = Flattener()
        carry = flattener.flatten(output, "the output of a block")
        calls, which = _kept(self.calls, which, len(flattener.tensors), len(self.tensors))
        return StageInput(carry, calls, which, (*flattener.tensors, *self.tensors), self.sequence_length)


# What follows from structure alone is the same for every micro-batch, and worked out once.


@lru_cache(maxsize=256)
def _used(
    carry: Skeleton, calls: tuple[Skeleton, ...], which: tuple[int, ...], sequence_length: int
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The skeleton of a packet with the tensors that are used, and where these stand."""
    used = tuple(dict.fromkeys(place for skeleton in (carry, *calls) for place in places(skeleton)))
    where = {place: i for i, place in enumerate(used)}
    return (renumber(carry, where), tuple(renumber(call, where) for call in calls), which, sequence_length), used


@lru_cache(maxsize=256)
def _kept(
    calls: tuple[Skeleton, ...], which: tuple[int, ...], num_new: int, num_old: int
) -> tuple[tuple[Skeleton, ...], tuple[int, ...]]:
    """The calls that are still to come, behind `num_new` more tensors."""
    shift = {i: num_new + i for i in range(num_old)}
    kept = list(dict.fromkeys(which))
    return tuple(renumber(calls[call], shift) for call in kept), tuple(kept.index(call) for call in which)
