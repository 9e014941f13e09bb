"""Registry: the builders of schedules by name, and the request that a builder gets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.number_checks import check_num_actions, is_number, is_size
from lightning_hanayo.schedule.schedule import Schedule


@dataclass(frozen=True)
class Request:
    """The arguments of `build` as a builder gets them: sizes are checked, defaults are not filled in.

    Raises:
        HanayoError: the name is no text, a size is no whole number of at least 1, the table would be too large, or the
            budget is no number above 0.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    num_waves: int = 1
    num_stages_per_rank: int | None = None
    costs: CostModel | None = None
    activation_budget: float | None = None
    steady: bool = False
    pairs: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise HanayoError(f"a schedule's name is text, got {self.name!r}; {nearest('', schedule_names())}")
        for argument in ("num_ranks", "num_microbatches", "num_waves", "num_stages_per_rank"):
            size = getattr(self, argument)
            if not (is_size(size) or (size is None and argument == "num_stages_per_rank")):
                wanted = "must be a whole number of at least 1"
                raise HanayoError(f"schedule {self.name!r}: {argument} {wanted}, got {size!r}")
            object.__setattr__(self, argument, size if size is None else int(size))  # NumPy's become Python's
        check_num_actions(self.num_ranks, self.num_microbatches, self.num_stages_per_rank or 2 * self.num_waves)
        budget = self.activation_budget
        if budget is not None and (not is_number(budget) or budget == 0):
            raise HanayoError(
                f"schedule {self.name!r}: activation_budget={budget!r}, expected a number above 0 (in M_a: one "
                "micro-batch's activations of a rank's whole share), or None"
            )

    def stages_per_rank(self, expected: int | None) -> int:
        """How many stages a rank holds. `expected`: the only number that the schedule can have; None: any (default 2).

        Raises `HanayoError` if several waves or another number were asked for.
        """
        if self.num_waves != 1 and expected != 2 * self.num_waves:
            raise HanayoError(
                f"schedule {self.name!r} has no waves, got num_waves={self.num_waves}; "
                "leave it out, use num_stages_per_rank with 'interleaved', or the schedule 'hanayo'"
            )
        asked = self.num_stages_per_rank
        if asked is not None and expected is not None and asked != expected:
            raise HanayoError(
                f"schedule {self.name!r} has {expected} stages per rank here, got num_stages_per_rank={asked}; "
                "leave it out, or use 'interleaved' (any number) or more num_waves (2 stages each)"
            )
        return expected or asked or 2


Builder = Callable[[Request], Schedule]

Depth = Literal["one", "two", "stages", "waves"]
"""how many stages per rank a schedule can have: one; two (down the ranks and back); any number; twice its waves"""


@dataclass(frozen=True)
class RegisteredSchedule:
    """A builder, and the property that all its schedules have."""

    build: Builder
    depth: Depth


_SCHEDULES: dict[str, RegisteredSchedule] = {}


def register_schedule(name: str, depth: Depth = "one") -> Callable[[Builder], Builder]:
    """Make a builder available to `build` under `name`.

    Args:
        name: of the schedule.
        depth: how many stages per rank it can have.

    Example:
        >>> @register_schedule("serial")
        ... def serial(request: Request) -> Schedule: ...

    Raises:
        HanayoError: the name is taken.
    """

    def register(builder: Builder) -> Builder:
        if name in _SCHEDULES:
            raise HanayoError(f"a schedule named {name!r} is registered already; choose another name")
        _SCHEDULES[name] = RegisteredSchedule(builder, depth)
        return builder

    return register


def registered(name: str) -> RegisteredSchedule:
    """The registered schedule `name`; raises `HanayoError` if there is none."""
    if name not in _SCHEDULES:
        raise HanayoError(f"there is no schedule {name!r}: {nearest(name, (*schedule_names(), 'auto'))}")
    return _SCHEDULES[name]


def schedule_names() -> tuple[str, ...]:
    """The names of all registered schedules, sorted."""
    return tuple(sorted(_SCHEDULES))


def sizes_for(name: str, num_waves: int) -> dict[str, int]:
    """The arguments of `build` that give the schedule as many stages per rank as `num_waves` waves have, 2W.

    None for a schedule with one stage per rank, which is compared as it is. Raises `HanayoError` if there is no such
    schedule, or it has two stages per rank and can't have more.

    Example:
        >>> sizes_for("hanayo", 2), sizes_for("interleaved", 2), sizes_for("1f1b", 2)
        ({'num_waves': 2}, {'num_stages_per_rank': 4}, {})
    """
    match registered(name).depth:
        case "waves":
            return {"num_waves": num_waves}
        case "stages":
            return {"num_stages_per_rank": 2 * num_waves}
        case "two" if num_waves != 1:
            raise HanayoError(f"{name!r} has two stages per rank, as one wave has; got num_waves={num_waves}")
        case _:
            return {}
