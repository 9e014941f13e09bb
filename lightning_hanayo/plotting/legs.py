"""Legs: which way a stage's micro-batches cross the ranks; what pictures shade, so that a zig-zag can be seen.

wave, W = 1                          chimera: two copies of the model

rank 0   0           7               rank 0   0           7
rank 1     1       6                 rank 1     1       6
rank 2       2   5                   rank 2       2   5        stages 4 to 7 are the twins of 0 to 3;
rank 3         3 4                   rank 3         3 4        their micro-batches run up the ranks
          leg 0   leg 1                       leg 0   leg 1
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_hanayo.schedule import Timeline


@dataclass(frozen=True)
class Legs:
    """The leg of each stage of a timeline."""

    of: Mapping[int, int | None]
    """per stage its number among its rank's stages; None: it holds only head and loss"""
    directions: bool = False
    """whether the legs are copies of the model, which a micro-batch visits one of"""

    @property
    def count(self) -> int:
        """How many there are."""
        return len({leg for leg in self.of.values() if leg is not None})


def legs(timeline: Timeline) -> Legs:
    """The legs of a timeline's stages, told by where and with which micro-batches they ran."""
    rank_of = {span.action.stage: span.rank for span in timeline.spans}
    count = [0] * timeline.num_ranks
    of: dict[int, int | None] = {}
    for stage, rank in sorted(rank_of.items()):
        is_loss = bool(timeline.shares) and timeline.shares[stage] == 0
        of[stage] = None if is_loss else count[rank]
        count[rank] += not is_loss
    return Legs(of, _num_chains(timeline) > 1)


def _num_chains(timeline: Timeline) -> int:
    """Copies of the model: each micro-batch begins at the first stage of one of them."""
    first: dict[int, int] = {}
    for span in timeline.spans:
        if span.action.microbatch is not None and span.action.kind.is_compute:
            microbatch, stage = span.action.microbatch, span.action.stage
            first[microbatch] = min(stage, first.get(microbatch, stage))
    return len(set(first.values()))
