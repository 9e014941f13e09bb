"""Contender: one schedule with its options, to be measured at any P and B. F = I = W, messages free."""

from dataclasses import dataclass
from functools import cache

from lightning_hanayo.schedule import Schedule, build, simulate


@dataclass(frozen=True)
class Measured:
    """What a contender does at one P and B."""

    bubble: float
    peak: float
    """activations of the fullest rank in M_a"""
    messages: int
    """per micro-batch, forward and backward"""


@dataclass(frozen=True)
class Contender:
    """A name that `build` knows, and what else to ask for."""

    name: str
    num_waves: int = 1
    num_stages_per_rank: int | None = None
    budget: float | None = None
    """activation budget as a part of P M_a"""

    @property
    def label(self) -> str:
        """Name, waves or stages per rank, and budget."""
        parts = [self.name]
        if self.name.startswith("hanayo"):
            parts.append(f"W={self.num_waves}")
        if self.num_stages_per_rank is not None:
            parts.append(f"V={self.num_stages_per_rank}")
        if self.budget is not None:
            parts.append(f"at {self.budget:g} P")
        return " ".join(parts)

    def schedule(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Its table."""
        return build(
            self.name,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_waves=self.num_waves,
            num_stages_per_rank=self.num_stages_per_rank,
            activation_budget=None if self.budget is None else self.budget * num_ranks,
        )


@cache
def measure(contender: Contender, num_ranks: int, num_microbatches: int) -> Measured:
    """Build it and simulate it."""
    schedule = contender.schedule(num_ranks, num_microbatches)
    timeline = simulate(schedule)
    return Measured(timeline.bubble_ratio, max(timeline.peak_activations), messages(schedule))


def messages(schedule: Schedule) -> int:
    """Hops between ranks that a micro-batch makes, there and back."""
    used = sorted({action.stage for row in schedule.actions for action in row if action.microbatch == 0})
    ranks = [schedule.stage_ranks[stage] for stage in used]
    return 2 * sum(one != next_ for one, next_ in zip(ranks, ranks[1:], strict=False))


WHOLE = (
    Contender("gpipe"),
    Contender("1f1b"),
    *(Contender("interleaved", num_stages_per_rank=stages) for stages in (2, 4, 8)),
    Contender("chimera"),
    *(Contender("hanayo", num_waves=waves) for waves in (1, 2, 4)),
)
"""Backward in one piece."""

SPLIT = (
    Contender("zb-h1"),
    *(Contender("interleaved-zb", num_stages_per_rank=stages) for stages in (2, 4, 8)),
    Contender("zbv"),
    Contender("v-half"),
    Contender("v-min"),
)
"""Backward split into input and weight gradient, by others."""

OURS = tuple(Contender("hanayo-zb", num_waves=waves) for waves in (1, 2, 4))

BUDGETS = (0.375, 0.5, 0.625, 0.75, 1.0)
"""Activation budgets in P M_a for the curve of `hanayo-zb`."""
