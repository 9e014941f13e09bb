"""Registry: the builders of schedules by name, and the request that a builder gets.

`build`: makes a schedule by its name and validates it, or finds the one that simulates best ("auto").
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.schedule.communication import forwards_before_backwards
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.number_checks import MAX_TRIED, check_num_actions, is_number, is_size
from lightning_hanayo.schedule.passes.pairing import EFFORT, pair_up
from lightning_hanayo.schedule.passes.validation import validate
from lightning_hanayo.schedule.schedule import Schedule
from lightning_hanayo.schedule.simulate import simulate


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
    forwards_first: bool = False

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
            expected = "expected a number above 0 (in M_a: one micro-batch's activations on a rank), or None"
            raise HanayoError(f"schedule {self.name!r}: activation_budget={budget!r}, {expected}")

    def stages_per_rank(self, expected: int | None) -> int:
        """How many stages a rank holds. `expected`: the only number that the schedule can have; None: any (default 2).

        Raises `HanayoError` if several waves or another number were asked for.
        """
        if self.num_waves != 1 and expected != 2 * self.num_waves:
            way_out = "leave it out, use num_stages_per_rank with 'interleaved', or the schedule 'hanayo'"
            raise HanayoError(f"schedule {self.name!r} has no waves, got num_waves={self.num_waves}; {way_out}")
        asked = self.num_stages_per_rank
        if asked is not None and expected is not None and asked != expected:
            has = f"schedule {self.name!r} has {expected} stages per rank here, got num_stages_per_rank={asked}"
            raise HanayoError(f"{has}; leave it out, or use 'interleaved' (any number) or num_waves (2 stages each)")
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


AUTO = "auto"
WAVES = (1, 2, 4, 8)
"""the numbers of waves that `num_waves="auto"` tries"""


def build(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_waves: int | Literal["auto"] = 1,
    num_stages_per_rank: int | None = None,
    costs: CostModel | None = None,
    activation_budget: float | None = None,
    steady: bool = False,
    pairs: bool = False,
    forwards_first: bool = False,
) -> Schedule:
    """The schedule `name` for these sizes, validated. The same arguments always give the same table.

    Args:
        name: one of `schedule_names()`. `"auto"`: the schedule that simulates best among those with as many stages per
            rank as `num_waves` waves have (or one stage per rank).
        num_ranks: P, pipeline ranks.
        num_microbatches: B, micro-batches per step; any number of at least 1.
        num_waves: W, for schedules in waves; a rank then holds 2W stages. `"auto"`: the best of 1, 2, 4 and 8.
        num_stages_per_rank: V, for `interleaved` and `interleaved-zb` (default 2).
        costs: for a schedule that chooses its order by costs, and for the simulations of `"auto"`; default T_F = 1,
            T_B = 2, messages free.
        activation_budget: the most activations a rank may hold, in M_a (one micro-batch's activations of one rank's
            whole share); default P for schedules that choose their order and for `"auto"`, no limit for the others.
        steady: the meaning of "best" where an order or schedule is chosen. True: the least time that each step adds if
            steps follow each other without a barrier (without norm clipping, say). False: the least time of one step.
        pairs: whether a rank may run two actions at once, of different micro-batches, where `costs` with `segments` say
            that the step gets shorter by that. A rank then holds one micro-batch more, unless there is a budget.
        forwards_first: let no backward begin before the last forward, for a loss of all micro-batches together. A rank
            then holds the activations of all of them.

    Raises:
        HanayoError: the name is unknown, a size is below 1 or too large, or the schedule can't keep to the budget.

    Example:
        >>> build("hanayo", num_ranks=4, num_microbatches=4).stage_ranks
        (0, 1, 2, 3, 3, 2, 1, 0)
        >>> build("auto", num_ranks=4, num_microbatches=8, num_waves="auto", costs=CostModel(message=0.1)).name
        'hanayo-zb'
    """
    waves = WAVES if num_waves == "auto" else (num_waves,)
    sizes = (num_ranks, num_microbatches, waves[0], num_stages_per_rank)
    request = Request(name, *sizes, costs, activation_budget, steady, pairs, forwards_first)
    if name == AUTO or len(waves) > 1:
        check_num_actions(num_ranks, num_microbatches, num_stages_per_rank or 2 * max(waves), most=MAX_TRIED)
    if name != AUTO and len(waves) == 1:
        return _build(request)
    if name != AUTO:
        return _fastest(request, product([name], waves))
    budget = float(num_ranks) if activation_budget is None else activation_budget
    return _fastest(replace(request, activation_budget=budget), product(schedule_names(), waves))


def _build(request: Request) -> Schedule:
    schedule = registered(request.name).build(request)
    if request.pairs and request.costs is not None and request.costs.segments:
        schedule = _paired(schedule, request, request.costs)
    if request.forwards_first:
        schedule = forwards_before_backwards(schedule)
    validate(schedule)
    if request.activation_budget is not None:
        peaks = simulate(schedule).peak_activations
        if (most := max(peaks)) > request.activation_budget + 1e-9:
            holds = f"schedule {schedule.name!r} holds {most:g} M_a of activations on rank {peaks.index(most)}"
            way_out = f"allow {most:g}, or use a schedule that keeps to a budget ('hanayo')"
            raise HanayoError(f"{holds}, more than activation_budget={request.activation_budget:g}; {way_out}")
    return schedule


def _paired(schedule: Schedule, request: Request, costs: CostModel) -> Schedule:
    """The schedule in pairs. Waves also try an order for one more micro-batch under way, and for whole backwards."""
    budget, steady = request.activation_budget, request.steady
    orders = [schedule]
    if registered(request.name).depth == "waves":
        roomy = replace(request, activation_budget=budget or request.num_ranks + 1.0)
        names = dict.fromkeys((request.name, "hanayo"))
        if request.name == "hanayo-zb" and request.num_waves == 1 and request.num_microbatches >= 2 * request.num_ranks:
            names["dualpipev"] = None
        orders += [replace(registered(name).build(roomy), name=request.name) for name in names]
    most = budget or max(simulate(schedule).peak_activations) + 1
    effort = EFFORT // len(orders)
    found = [pair_up(one, costs, budget=most, steady=steady, effort=effort) for one in orders]
    return min(found, key=lambda one: simulate(one, costs, steps=2 if steady else 1).step_times[-1])


def _fastest(request: Request, choices: Iterable[tuple[str, int]]) -> Schedule:
    """The fastest of `choices` (name, number of waves); among equally fast ones the one with the fewest stages."""
    found: list[tuple[float, int, Schedule]] = []
    refused: dict[tuple[bool, int], HanayoError] = {}
    for number, (name, num_waves) in enumerate(choices):
        try:
            sizes: dict[str, Any] = sizes_for(name, num_waves) if request.num_stages_per_rank is None else {}
            schedule = _build(replace(request, name=name, **sizes))
            time = simulate(schedule, request.costs, steps=2 if request.steady else 1).step_times[-1]
        except HanayoError as error:  # the schedule can't have these sizes, costs or budget
            refused[registered(name).depth == "waves", number] = error
        else:
            found.append((float(f"{time:.9g}"), schedule.num_stages, schedule))
    if not found:
        raise refused[max(refused)]  # of waves the last one, hanayo-zb, which needs the least budget
    return min(found, key=lambda one: one[:2])[2]
