"""Registry: the schedules by name, and what a builder is asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.number import is_number, is_size
from lightning_hanayo.schedule.passes.validation import validate
from lightning_hanayo.schedule.simulation.simulate import simulate
from lightning_hanayo.schedule.table import Schedule


@dataclass(frozen=True)
class Request:
    """What `build` was asked for, as a builder sees it: sizes checked, nothing filled in.

    Raises:
        HanayoError: the name is no text, a size is below 1 or no size, or the budget no number above 0.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    num_waves: int = 1
    num_stages_per_rank: int | None = None
    costs: CostModel | None = None
    activation_budget: float | None = None
    steady: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise HanayoError(f"a schedule's name is text, got {self.name!r}; {nearest('', schedule_names())}")
        sizes = {"num_ranks": self.num_ranks, "num_microbatches": self.num_microbatches, "num_waves": self.num_waves}
        if self.num_stages_per_rank is not None:
            sizes["num_stages_per_rank"] = self.num_stages_per_rank
        for what, size in sizes.items():
            if not is_size(size):
                raise HanayoError(f"schedule {self.name!r}: {what} must be a whole number of at least 1, got {size!r}")
        budget = self.activation_budget
        if budget is not None and (not is_number(budget) or budget == 0):
            raise HanayoError(
                f"schedule {self.name!r}: activation_budget={budget!r}, expected a number above 0 (in M_a: one "
                "micro-batch's activations of a rank's whole share), or None"
            )

    def stages_per_rank(self, expected: int | None, *, default: int) -> int:
        """How many stages a rank holds; a schedule that `expected` a fixed number refuses any other.

        Raises:
            HanayoError: `num_stages_per_rank` isn't what the schedule can do.
        """
        asked = self.num_stages_per_rank
        if asked is not None and expected is not None and asked != expected:
            raise HanayoError(
                f"schedule {self.name!r} has {expected} stages per rank here, got num_stages_per_rank={asked}; "
                "leave it out, or use 'interleaved' (any number) or more num_waves (2 stages each)"
            )
        return default if asked is None else asked

    def refuse_waves(self) -> None:
        """For schedules whose stages don't lie in a zig-zag.

        Raises:
            HanayoError: several waves were asked for.
        """
        if self.num_waves != 1:
            raise HanayoError(
                f"schedule {self.name!r} has no waves, got num_waves={self.num_waves}; "
                "leave it out, use num_stages_per_rank with 'interleaved', or the schedule 'hanayo'"
            )


Builder = Callable[[Request], Schedule]

Depth = Literal["one", "two", "stages", "waves"]
"""how many stages per rank a schedule can have: one; two (once down the ranks and back); any; or twice its waves"""

_BUILDERS: dict[str, Builder] = {}
_DEPTHS: dict[str, Depth] = {}


def register_schedule(name: str, depth: Depth = "one") -> Callable[[Builder], Builder]:
    """Make a builder known to `build` under `name`.

    Example:
        >>> @register_schedule("serial")
        ... def serial(request: Request) -> Schedule: ...

    Raises:
        HanayoError: the name is taken.
    """

    def register(builder: Builder) -> Builder:
        if name in _BUILDERS:
            raise HanayoError(f"a schedule named {name!r} is registered already; choose another name")
        _BUILDERS[name] = builder
        _DEPTHS[name] = depth
        return builder

    return register


def schedule_names() -> tuple[str, ...]:
    """The names `build` knows, sorted."""
    return tuple(sorted(_BUILDERS))


def sizes_for(name: str, num_waves: int) -> dict[str, int]:
    """The arguments of `build` that give the schedule as many stages per rank as `num_waves` waves have, 2W.

    A schedule of one stage per rank has no such choice, and takes part as it is.

    Example:
        >>> sizes_for("hanayo", 2), sizes_for("interleaved", 2), sizes_for("1f1b", 2)
        ({'num_waves': 2}, {'num_stages_per_rank': 4}, {})

    Raises:
        HanayoError: the schedule has two stages per rank and can't have more.
    """
    match _DEPTHS[name]:
        case "waves":
            return {"num_waves": num_waves}
        case "stages":
            return {"num_stages_per_rank": 2 * num_waves}
        case "two" if num_waves != 1:
            raise HanayoError(f"{name!r} has two stages per rank, as one wave has; got num_waves={num_waves}")
        case _:
            return {}


def build_named(request: Request) -> Schedule:
    """The schedule that `request` names, validated and within the budget."""
    name = request.name
    if name not in _BUILDERS:
        raise HanayoError(f"there is no schedule {name!r}: {nearest(name, (*schedule_names(), 'auto'))}")
    schedule = _BUILDERS[name](request)
    validate(schedule)
    if request.activation_budget is not None:
        _check_budget(schedule, request.activation_budget)
    return schedule


def _check_budget(schedule: Schedule, budget: float) -> None:
    peak = simulate(schedule).peak_activations
    worst = max(range(schedule.num_ranks), key=peak.__getitem__)
    if peak[worst] > budget + 1e-9:
        raise HanayoError(
            f"schedule {schedule.name!r} holds {peak[worst]:g} M_a of activations on rank {worst}, more than "
            f"activation_budget={budget:g}; allow {max(peak):g}, or use a schedule that keeps to a budget ('hanayo')"
        )
