"""MemoryModel: computes from the bytes of each stage how many bytes each rank holds over time."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.number_checks import check_numbers
from lightning_hanayo.schedule.simulation.timeline import Curve, Timeline

Bytes = float | tuple[float, ...]

_STANDING = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The most bytes that one rank holds, by purpose."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """at their peak"""

    @property
    def total(self) -> float:
        """All of it at the peak."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class MemoryModel:
    """Bytes. A number is for one rank's whole share of the model, divided among its stages. A tuple (or a list) gives
    each stage's own bytes, with or without the loss stage's. With two replicas of the model (chimera) a rank holds two
    shares, and the values of one replica are enough.

        bytes   |       ____        activations: from the start of a stage's F to the end of its B or W
                |   ___|    |___
                |__|            |__
                |  optimizer
                |  gradients        all the time: `.grad` is kept from step to step
                |__weights________  time

    Example:
        >>> memory = MemoryModel(activation=2e9, weights=1e9, gradients=1e9, optimizer=4e9)
        >>> memory.peaks(simulate(build("1f1b", num_ranks=2, num_microbatches=4)))[0].total
        10000000000.0
    """

    activation: Bytes
    """what one micro-batch keeps for its backward"""
    weights: Bytes = 0.0
    gradients: Bytes = 0.0
    optimizer: Bytes = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, "expected a finite number of bytes of at least 0, or one per stage")

    def peaks(self, timeline: Timeline) -> tuple[RankMemory, ...]:
        """The most that each rank holds at once."""
        peaks = []
        for rank in range(timeline.num_ranks):
            weights, gradients, optimizer = (self._sum(name, timeline, rank) for name in _STANDING)
            held = timeline.held(rank, self._of_stages("activation", timeline))
            peaks.append(RankMemory(weights, gradients, optimizer, max(amount for _, amount in held)))
        return tuple(peaks)

    def curve(self, timeline: Timeline, rank: int) -> Curve:
        """The bytes that a rank holds: (time, bytes from then on), from the begin of the timeline."""
        standing = sum(self._sum(name, timeline, rank) for name in _STANDING)
        activations = timeline.held(rank, self._of_stages("activation", timeline))
        return tuple((time, standing + held) for time, held in activations)

    def _sum(self, name: str, timeline: Timeline, rank: int) -> float:
        values = self._of_stages(name, timeline)
        return sum(values[stage] for stage, holder in timeline.rank_of.items() if holder == rank)

    def _of_stages(self, name: str, timeline: Timeline) -> Sequence[float]:
        value: Bytes = getattr(self, name)
        shares = timeline.stage_shares
        if not isinstance(value, tuple):
            return [value * share for share in shares]
        if 2 * len(value) == len(shares) and _visited(timeline) == len(value):
            return value * 2
        has_loss_stage = bool(shares) and shares[-1] == 0
        if len(value) not in (len(shares) - has_loss_stage, len(shares)):
            raise HanayoError(f"MemoryModel: {name} has {len(value)} values, the timeline {len(shares)} stages")
        return value if len(value) == len(shares) else (*value, 0.0)


def _visited(timeline: Timeline) -> int:
    """How many stages one micro-batch visits: half of them with two replicas of the model."""
    one = timeline.spans[0].action.microbatch
    return len({span.action.stage for span in timeline.spans if span.action.microbatch == one})
