"""The cargo: what travels down the stack of blocks with one micro-batch.

    carry    the last block's output                            a tree
    calls    the distinct calls of the blocks still to come     (args, kwargs) with holes where the carry goes
    which    for each block still to come, its call             indices into `calls`

A mask that all blocks get is one tensor in one call; Gemma's two kinds of masks are two calls.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_hanayo.runtime.hole import pick
from lightning_hanayo.runtime.packet import Packet
from lightning_hanayo.runtime.tree import Flattener, Skeleton, places, renumber, unflatten

NOTHING: Skeleton = ("plain", "NoneType", None)


@dataclass(frozen=True)
class Cargo:
    """A packet, read as carry and calls."""

    carry: Skeleton
    calls: tuple[Skeleton, ...]
    which: tuple[int, ...]
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(packet: Packet) -> "Cargo":
        """The cargo that `packet` holds."""
        carry, calls, which = packet.skeleton
        return Cargo(carry, calls, which, packet.tensors)

    @property
    def packet(self) -> Packet:
        """As a packet, with the tensors it really uses, each once."""
        used = list(dict.fromkeys(place for skeleton in (self.carry, *self.calls) for place in places(skeleton)))
        where = {place: i for i, place in enumerate(used)}
        skeleton = (renumber(self.carry, where), tuple(renumber(call, where) for call in self.calls), self.which)
        return Packet(skeleton, tuple(self.tensors[place] for place in used))

    @property
    def output(self) -> Any:
        """The carry as a tree: after the last block, the output of the stack."""
        return unflatten(self.carry, self.tensors)

    def through(self, blocks: list[nn.Module]) -> "Cargo":
        """The cargo behind `blocks`, which are the next ones in the stack."""
        output = self.output
        for block, which in zip(blocks, self.which, strict=False):
            args, kwargs = unflatten(self.calls[which], self.tensors, partial(pick, output))
            output = block(*args, **kwargs)
        return self._behind(output, self.which[len(blocks) :]) if blocks else self

    def _behind(self, output: Any, which: tuple[int, ...]) -> "Cargo":
        flattener = Flattener()
        carry = flattener.flatten(output, "the output of a block")
        shift = {i: len(flattener.tensors) + i for i in range(len(self.tensors))}
        kept = list(dict.fromkeys(which))
        calls = tuple(renumber(self.calls[call], shift) for call in kept)
        return Cargo(carry, calls, tuple(kept.index(call) for call in which), (*flattener.tensors, *self.tensors))
