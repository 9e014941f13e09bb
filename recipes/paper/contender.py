"""Defines contenders: schedules with their options, simulated at any P and B with F = I = W and free messages."""

from dataclasses import dataclass
from functools import cache

from lightning_hanayo.schedule import Timeline, build, simulate
from recipes.paper.two_copies import SCHEDULES, simulate_copies


@dataclass(frozen=True)
class Measured:
    """The simulated figures of a contender at one P and B."""

    bubble: float
    peak: float
    """activations of the rank that holds the most, in M_a"""
    messages: int
    """per micro-batch, forward and backward"""


@dataclass(frozen=True)
class Contender:
    """A schedule's name and its options for `build`; or the name of one with two copies of the model."""

    name: str
    num_waves: int = 1
    num_stages_per_rank: int | None = None
    budget: float | None = None
    """activation budget as a fraction of P M_a"""

    @property
    def label(self) -> str:
        """Its name with waves or stages per rank, and the budget."""
        parts = [self.name]
        if self.name.startswith("hanayo"):
            parts.append(f"W={self.num_waves}")
        if self.num_stages_per_rank is not None:
            parts.append(f"V={self.num_stages_per_rank}")
        if self.budget is not None:
            parts.append(f"at {self.budget:g} P")
        return " ".join(parts)

    def timeline(self, num_ranks: int, num_microbatches: int) -> Timeline:
        """Build its table and simulate it."""
        if self.name in SCHEDULES:
            return simulate_copies(SCHEDULES[self.name](num_ranks, num_microbatches))
        schedule = build(
            self.name,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_waves=self.num_waves,
            num_stages_per_rank=self.num_stages_per_rank,
            activation_budget=None if self.budget is None else self.budget * num_ranks,
        )
        return simulate(schedule)


@cache
def measure(contender: Contender, num_ranks: int, num_microbatches: int) -> Measured:
    """Build and simulate a contender."""
    timeline = contender.timeline(num_ranks, num_microbatches)
    return Measured(timeline.bubble_ratio, max(timeline.peak_activations), messages(timeline))


def messages(timeline: Timeline) -> int:
    """Messages between ranks per micro-batch, forward and backward."""
    used = sorted({span.action.stage for span in timeline.spans if span.action.microbatch == 0})
    ranks = [timeline.rank_of[stage] for stage in used]
    return 2 * sum(one != next_ for one, next_ in zip(ranks, ranks[1:], strict=False))


WHOLE = (
    Contender("gpipe"),
    Contender("1f1b"),
    *(Contender("interleaved", num_stages_per_rank=stages) for stages in (2, 4, 8)),
    Contender("chimera"),
    *(Contender("hanayo", num_waves=waves) for waves in (1, 2, 4)),
)
"""Schedules with the backward in one piece."""

SPLIT = (
    Contender("zb-h1"),
    *(Contender("interleaved-zb", num_stages_per_rank=stages) for stages in (2, 4, 8)),
    Contender("zbv"),
    Contender("v-half"),
    Contender("v-min"),
)
"""Other authors' schedules with the backward split into input and weight gradient."""

PAIRED = (Contender("dualpipev"),)
"""Schedules whose ranks run two actions at once. Here a pair takes as long as both alone."""

OURS = tuple(Contender("hanayo-zb", num_waves=waves) for waves in (1, 2, 4))

BUDGETS = (0.375, 0.5, 0.625, 0.75, 1.0)
"""Activation budgets in P M_a for the curve of `hanayo-zb`."""
