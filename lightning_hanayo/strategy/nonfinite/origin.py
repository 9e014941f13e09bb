"""Finds where the first NaN was made among all that ranks have found, and says it in a sentence.

micro-batch 0     block 0 .. block 3   loss   stage 3 .. stage 1        what is computed from a NaN is NaN
micro-batch 1     block 0 .. NaN NaN   NaN    NaN     .. NaN            began in the forward of block 2
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lightning_hanayo.errors import listed
from lightning_hanayo.runtime.values import BEFORE_STACK, Place

_DIRECTIONS = ("forward", "loss", "backward")


@dataclass(frozen=True)
class Finding:
    """What one rank has found: places whose values aren't finite, and whether each is NaN; names of gradients."""

    rank: int
    places: Sequence[tuple[Place, bool]]
    gradients: Sequence[str]
    """parameters of this rank whose gradient isn't finite"""
    before_clipping: Sequence[str] = ()
    """those whose gradient wasn't finite when its norm was taken; clipping then spoils all"""


@dataclass(frozen=True)
class Origin:
    """Where the first one was made, and whether it is NaN, not infinite."""

    rank: int
    place: Place
    is_nan: bool


@dataclass(frozen=True)
class BlockNames:
    """The names of the stack's blocks, and the blocks of each stage."""

    blocks: Sequence[str]
    stages: Sequence[range]

    def of_block(self, index: int) -> str:
        """A block and its stage."""
        stage = next(number for number, blocks in enumerate(self.stages) if index in blocks)
        return f"{self.blocks[index]} (stage {stage})"

    def of_stage(self, stage: int) -> str:
        """The blocks of a stage, and what else runs in it."""
        blocks = self.stages[stage]
        names = " to ".join(self.blocks[i] for i in sorted({blocks[0], blocks[-1]})) if blocks else "the loss"
        return f"{names} (stage {stage})"

    def stage_of(self, name: str) -> int:
        """The stage of a parameter; 0 outside the stack."""
        block = next((i for i, block in enumerate(self.blocks) if name.startswith(f"{block}.")), 0)
        return next(number for number, blocks in enumerate(self.stages) if block in blocks)


def first_of(findings: Collection[Finding]) -> Origin | None:
    """The first place of the first micro-batch whose loss, or a gradient after it, isn't finite."""
    found = [Origin(one.rank, place, is_nan) for one in findings for place, is_nan in one.places]
    reached = {_microbatch(one.place) for one in found if one.place.direction != "forward"}
    return min(
        found,
        key=lambda one: (_microbatch(one.place) not in reached, _microbatch(one.place), *_position(one)),
        default=None,
    )


def loss_is_finite(findings: Collection[Finding]) -> bool:
    """Whether all losses are."""
    return all(place.direction != "loss" for one in findings for place, _ in one.places)


def described(findings: Sequence[Finding], blocks: BlockNames, place_of: Callable[[int], str]) -> str:
    """Where it began, as the end of a sentence. `place_of` says which rank a rank is."""
    origin = first_of(findings)
    if origin is None:
        found = {one.rank: one.before_clipping for one in findings if one.before_clipping}
        found = found or {one.rank: one.gradients for one in findings if one.gradients}
        if not found:
            return "no longer known where"
        rank = min(found)
        names = listed(sorted({name for each in found.values() for name in each}), most=3)
        return f"only in gradients of parameters: {names}, on rank {rank} ({place_of(rank)})"
    place = origin.place
    batch = f" of batch {place.batch} of those that accumulate" if place.batch else ""
    value = "NaN" if origin.is_nan else "infinite"
    where = f"{_where(place, blocks)}, micro-batch {place.microbatch}{batch}"
    return f"first in {where}, on rank {origin.rank} ({place_of(origin.rank)}), which made a value that is {value}"


def _where(place: Place, blocks: BlockNames) -> str:
    if place.direction == "loss":
        return "the loss: all blocks' outputs were finite"
    if place.direction == "backward":
        return f"the backward of {blocks.of_stage(place.index)}"
    if place.index == BEFORE_STACK:
        return f"the input of {blocks.of_block(0)}: in the batch, or in the code before the blocks"
    return f"the forward of {blocks.of_block(place.index)}"


def _microbatch(place: Place) -> tuple[int, int]:
    return place.batch, place.microbatch


def _position(one: Origin) -> tuple[int, int, int, int]:
    """How far it is from the beginning of its micro-batch; last the rank."""
    place = one.place
    sign = -1 if place.direction == "backward" else 1
    return _DIRECTIONS.index(place.direction), sign * place.pass_number, sign * place.index, one.rank
