"""Names the likely cause of a difference between a layout and one process, and where the value belongs."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose

from lightning_hanayo.checking.case import RankResult, Stage
from lightning_hanayo.checking.comparison import Comparison, Difference, Key
from lightning_hanayo.errors import listed


@dataclass(frozen=True)
class Place:
    """Where values belong on a layout."""

    stack: str
    stages: tuple[Stage, ...]
    has_cube: bool
    shares_samples: bool = False
    """whether each rank of a cube runs the step on its share of a micro-batch: `cube_outside="share"`"""

    def block_of(self, name: str) -> int | None:
        """The number of the block that a parameter or buffer belongs to; None outside the stack."""
        found = re.match(rf"{re.escape(self.stack)}\.(\d+)\." if self.stack else r"(\d+)\.", name)
        return int(found[1]) if found else None

    def stage_of(self, block: int) -> int:
        """The stage that has the block."""
        return next(i for i, stage in enumerate(self.stages) if block in stage.blocks)

    def rank_of(self, name: str) -> int:
        """The pipeline rank that has the value: 0 for what is outside the stack."""
        block = self.block_of(name)
        return 0 if block is None else self.stages[self.stage_of(block)].pipe_rank

    def describe(self, key: Key) -> str:
        """In words, such as "block 5 of model.layers, on pipeline rank 1, stage 2"."""
        if key.kind in ("loss", "log"):
            return "computed by the step on pipeline rank 0"
        block = self.block_of(key.name)
        sharded = ", sharded over the cube" if self.has_cube and key.kind != "buffer" else ""
        if block is None:
            return f"outside the stack {self.stack}, on pipeline rank 0{sharded}"
        stage = self.stage_of(block)
        return f"block {block} of {self.stack}, on pipeline rank {self.stages[stage].pipe_rank}, stage {stage}{sharded}"


def likely_cause(compared: Comparison, place: Place, one_process: RankResult) -> str:
    """What explains the differences best: one or two sentences.

    Args:
        compared: the layout with one process; not exact.
        place: where values belong.
        one_process: what the step did in one process.
    """
    first = compared.differences[0]
    if first.data_rank:
        return f"Data rank {first.data_rank} has another value than one process: the data ranks don't agree on it."
    if first.key.kind == "log":
        return (
            "Only logged values differ, and no loss, gradient or weight: they are reduced over micro-batches otherwise."
        )
    reason = _BY_KIND[first.key.kind](compared, place, one_process)
    if first.key.step == 0:
        return reason
    return (
        f"Optimizer step {first.key.step} is the first that differs, so it depends on what the earlier ones have left "
        f"besides weights and buffers: attributes that the step or the blocks set, or the optimizer's state. {reason}"
    )


def stored_by_blocks(changed_attributes: Sequence[str], stack: str) -> str:
    """The cause, if blocks set attributes; else nothing."""
    of_blocks = [name for name in changed_attributes if name.startswith(f"{stack}.")]
    patterns = sorted({re.sub(rf"^({re.escape(stack)}\.)\d+", r"\1*", name) for name in of_blocks})
    if not patterns:
        return ""
    return (
        f"Blocks set {listed(patterns, 4)} in their forward. What a block stores on another rank isn't seen by the "
        f"step on pipeline rank 0: let the block return it."
    )


def _of_loss(compared: Comparison, place: Place, one_process: RankResult) -> str:
    stored = stored_by_blocks(one_process.changed_attributes, place.stack)
    if stored:
        return stored
    if one_process.draws_numbers and place.has_cube:
        return "The step draws random numbers, and the ranks of a cube draw numbers of their own."
    outside = [name for name in one_process.changed_attributes if place.block_of(name) is None]
    if outside:
        return (
            f"The step changes {listed(outside, 4)}. Where micro-batches overlap, their steps interleave: one reads it "
            f"before the one in front has set it."
        )
    if place.shares_samples:
        return (
            "With cube_outside='share' the step of each rank of the cube sees its share of a micro-batch's samples. If "
            "they depend on each other (in-batch negatives, a norm over them), use cube_outside='replicate'."
        )
    return (
        "The forward itself is different: the step reads something that isn't the stack's output (parameters of "
        "blocks, a random generator of its own), or the micro-batches were cut otherwise."
    )


def _of_gradient(compared: Comparison, place: Place, one_process: RankResult) -> str:
    step = compared.differences[0].key.step
    wrong = [one for one in compared.differences if one.key.kind == "gradient" and one.key.step == step]
    names = {one.key.name for one in wrong}
    order = [name for name in one_process.forward_order if _is_gradient(one_process, step, name)]
    right = [name for name in order if name not in names]
    factors = [one.factor for one in wrong if one.factor is not None]
    scaled = bool(factors) and len(factors) == len(wrong) and all(isclose(f, factors[0], rel_tol=1e-4) for f in factors)
    times = f" All of them are {factors[0]:.6g} times what they should be." if scaled else ""
    return f"The loss is right. {_which(wrong, right, order, place)}{times}"


def _which(wrong: Sequence[Difference], right: Sequence[str], order: Sequence[str], place: Place) -> str:
    names = [one.key.name for one in wrong]
    if not right:
        return "All gradients differ: the loss is weighed otherwise, or the ranks sum them otherwise."
    if len(names) == 1:
        return f"Only the gradient of {names[0]} differs."
    if all(place.block_of(name) is None for name in names):
        return "Only parameters outside the stack differ."
    ranks = {place.rank_of(name) for name in names}
    if len(ranks) == 1 and all(place.block_of(name) is not None for name in names):
        of_blocks = f"of blocks on pipeline rank {ranks.pop()}"
        if len({place.stage_of(place.block_of(name) or 0) for name in names}) == 1:
            of_blocks += f", stage {place.stage_of(place.block_of(names[0]) or 0)},"
        return f"Only parameters {of_blocks} differ."
    last = max(order.index(name) for name in names if name in order)
    if all(order.index(name) > last for name in right):
        return f"Gradients are right from {right[0]} on, and wrong before it: one was lost or changed on its way back."
    return f"{len(names)} of {len(order)} gradients differ."


def _of_weight(compared: Comparison, place: Place, one_process: RankResult) -> str:
    return (
        "Losses and gradients are right until here. The optimizer, the clipping, or a hook between backward and step "
        "works across parameters (a norm over all of them, say), of which each rank has only its own."
    )


def _of_buffer(compared: Comparison, place: Place, one_process: RankResult) -> str:
    return "Only buffers differ: one is changed where the micro-batches come in another order, or on another rank."


_BY_KIND: dict[str, Callable[[Comparison, Place, RankResult], str]] = {
    "loss": _of_loss, "gradient": _of_gradient, "weight": _of_weight, "buffer": _of_buffer,
}  # fmt: skip


def _is_gradient(result: RankResult, step: int, name: str) -> bool:
    return Key(step, "gradient", name) in result.values
