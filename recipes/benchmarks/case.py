"""Names the candidates of the pipeline benchmark, and defines a case: the sizes and times of one pipeline."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.schedule import CostModel, Schedule, build
from lightning_hanayo.schedule.registry import sizes_for
from recipes.benchmarks.emulated import StageTimes

PLANNED = "hanayo-zb-planned"
"""with the number of waves that is fastest in simulation, with measured times of a message and of the runtime"""
OURS = ("1f1b", "interleaved", "interleaved-zb", "zbv", "hanayo", "hanayo-zb", PLANNED)
TORCHS = {
    "torch-1f1b": "Schedule1F1B",
    "torch-interleaved": "ScheduleInterleaved1F1B",
    "torch-interleaved-zb": "ScheduleInterleavedZeroBubble",
    "torch-zbv": "ScheduleZBVZeroBubble",
    "torch-hanayo-zb": "",
}
"""torch's own schedules, and our table in torch's runtime, whose class is `_PipelineScheduleRuntime`"""
BARE = ("bare-hanayo-zb",)
"""only the sleeps and messages of our schedule: the least time that any runtime could need"""
AUTOGRAD = ("autograd-hanayo-zb",)
"""these, and autograd's forwards and backwards: what a runtime needs at least that computes gradients with it"""
NAMES = (*OURS, *TORCHS, *AUTOGRAD, *BARE)


BYTES_PER_FLOAT = 4


@dataclass(frozen=True)
class Candidate:
    """A schedule in a runtime."""

    name: str
    waves: int

    @property
    def runtime(self) -> Literal["ours", "torch", "autograd", "bare"]:
        """The runtime that runs it."""
        if self.name in OURS:
            return "ours"
        return "torch" if self.name in TORCHS else "autograd" if self.name in AUTOGRAD else "bare"

    @property
    def schedule_name(self) -> str:
        """The schedule's name in our registry."""
        return self.name.removeprefix(f"{self.runtime}-").removesuffix("-planned")

    @property
    def is_planned(self) -> bool:
        """Whether its number of waves is chosen by simulation."""
        return self.name == PLANNED

    @property
    def label(self) -> str:
        """Its name in tables: `hanayo-zb W=2`, `torch interleaved V=4`."""
        if self.is_planned:
            return f"{self.schedule_name} W planned"
        sizes = sizes_for(self.schedule_name, self.waves)
        depth = "".join(f" {'W' if what == 'num_waves' else 'V'}={size}" for what, size in sizes.items())
        return ("" if self.runtime == "ours" else f"{self.runtime} ") + self.schedule_name + depth


@dataclass(frozen=True)
class Case:
    """What all candidates run. Times are in seconds, for a rank's whole share of the model."""

    num_ranks: int
    num_microbatches: int
    forward: float
    backward_input: float
    backward_weight: float
    message_bytes: int
    steps: int
    planned_message: float | None = 0.0
    """the message time for which searched schedules choose their order; None: the ranks measure it first"""
    per_action: float = 0.0
    """what the runtime takes for each action, with which the number of waves is chosen"""

    @property
    def width(self) -> int:
        """The number of floats in a message."""
        return max(1, self.message_bytes // BYTES_PER_FLOAT)

    @property
    def costs(self) -> CostModel:
        """The costs of the ideal step, whose messages take no time."""
        return CostModel(self.forward, self.backward_input, self.backward_weight)

    @property
    def busy(self) -> float:
        """The seconds for which a rank computes in a step."""
        return self.num_microbatches * (self.forward + self.backward_input + self.backward_weight)

    def schedule(self, candidate: Candidate) -> Schedule:
        """Our table for a candidate. The loss is computed on the rank that holds the last stage."""
        assert self.planned_message is not None, "the message time is known before schedules are built"
        times = (self.forward, self.backward_input, self.backward_weight)
        # Without compute times there is nothing to plan with: keep the order for equal stages
        planned = CostModel(*times, message=self.planned_message) if self.forward else CostModel()
        sizes: dict[str, Any] = sizes_for(candidate.schedule_name, candidate.waves)
        if candidate.is_planned:
            planned, sizes = replace(planned, per_action=self.per_action), {"num_waves": "auto"}
        return build(
            candidate.schedule_name,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            costs=planned,
            steady=self.steps > 1,
            **sizes,
        )

    def times(self, num_stages: int) -> StageTimes:
        """The times of one stage, of which a rank holds several."""
        per_rank = num_stages / self.num_ranks
        return StageTimes(self.forward / per_rank, self.backward_input / per_rank, self.backward_weight / per_rank)


def candidates(names: Iterable[str], waves: Iterable[int]) -> list[Candidate]:
    """Combine each name with each number of waves; schedules without waves come once.

    Example:
        >>> [one.label for one in candidates(["1f1b", "torch-zbv", "hanayo-zb"], [1, 2])]
        ['1f1b', 'torch zbv', 'hanayo-zb W=1', 'hanayo-zb W=2']

    Raises:
        HanayoError: a name is unknown.
    """
    found: dict[str, Candidate] = {}
    for name in names:
        if name not in NAMES:
            raise HanayoError(f"there is no candidate {name!r}: {nearest(name, NAMES)}")
        for count in (1,) if name.removeprefix("torch-") in ("1f1b", "zbv", PLANNED) else waves:
            candidate = Candidate(name, count)
            found.setdefault(candidate.label, candidate)
    return list(found.values())
