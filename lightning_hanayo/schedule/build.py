"""Auto: `build`, which makes a schedule by its name, or finds the one that simulates best."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.cost import CostModel, WrongLength
from lightning_hanayo.schedule.registry import Request, build_named, schedule_names, sizes_for
from lightning_hanayo.schedule.simulation.simulate import simulate
from lightning_hanayo.schedule.table import Schedule

AUTO = "auto"
WAVES = (1, 2, 4, 8)
"""what `num_waves="auto"` tries"""
_TWICE = ("chimera",)
"""schedules that hold the weights twice: no answer to who only asked for a budget of activations"""


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
) -> Schedule:
    """The schedule `name` for these sizes, validated. The same arguments always give the same table.

    Args:
        name: one of `schedule_names()`; `"auto"`: the one that simulates best with as many stages per rank as
            `num_waves` waves have (or one), and the weights once.
        num_ranks: P, pipeline ranks.
        num_microbatches: B, micro-batches per step; any number of at least 1.
        num_waves: W, for schedules in waves; a rank then holds 2W stages. `"auto"`: the best of 1, 2, 4 and 8.
        num_stages_per_rank: V, for `interleaved` and `interleaved-zb` (default 2).
        costs: what a schedule that chooses its order optimizes for, and what `"auto"` simulates with; default T_F = 1,
            T_B = 2, messages free.
        activation_budget: the most activations a rank may hold, in M_a (one micro-batch's activations of one rank's
            whole share); default P for schedules that choose their order and for `"auto"`, no limit for the others.
        steady: what "best" means where an order, or a schedule, is chosen: the time that each step adds where steps
            follow each other without a barrier (no norm clipping, say); else the time of one step from a standstill.

    Raises:
        HanayoError: an unknown name, a size below 1, or a budget the schedule can't keep.

    Example:
        >>> build("hanayo", num_ranks=4, num_microbatches=4).stage_ranks
        (0, 1, 2, 3, 3, 2, 1, 0)
        >>> build("auto", num_ranks=4, num_microbatches=8, num_waves="auto", costs=CostModel(message=0.1)).name
        'hanayo-zb'
    """
    waves = WAVES if num_waves == "auto" else (num_waves,)
    request = Request(
        name, num_ranks, num_microbatches, waves[0], num_stages_per_rank, costs, activation_budget, steady
    )
    if name != AUTO and len(waves) == 1:
        return build_named(request)
    if name == AUTO and request.activation_budget is None:
        request = replace(request, activation_budget=float(num_ranks))
    names = [one for one in schedule_names() if one not in _TWICE] if name == AUTO else [name]
    return _fastest(request, product(names, waves))


def _fastest(request: Request, choices: Iterable[tuple[str, int]]) -> Schedule:
    """Among equally fast ones the one with the fewest stages."""
    found: list[tuple[float, int, Schedule]] = []
    refused: dict[str, HanayoError] = {}
    lengths: dict[int, dict[int, WrongLength]] = {}
    for name, num_waves in choices:
        try:
            sizes: dict[str, Any] = sizes_for(name, num_waves) if request.num_stages_per_rank is None else {}
            schedule = build_named(replace(request, name=name, **sizes))
            time = simulate(schedule, request.costs, steps=2 if request.steady else 1).step_times[-1]
        except WrongLength as error:
            lengths.setdefault(num_waves, {})[error.wanted] = error
        except HanayoError as error:  # not with these sizes, costs or budget
            refused[name] = error
        else:
            found.append((float(f"{time:.9g}"), schedule.num_stages, schedule))
    if not found and lengths and not refused.keys() & {"hanayo", "hanayo-zb"}:  # these fit any number of waves
        raise _no_length(lengths)
    if not found:
        raise refused.get("hanayo-zb", next(iter(refused.values())))  # it can keep to the smallest budget
    return min(found, key=lambda one: one[:2])[2]


def _no_length(lengths: dict[int, dict[int, WrongLength]]) -> HanayoError:
    """What says which numbers of values fit, by waves."""
    error = next(one for stages in lengths.values() for one in stages.values())
    fitting = "; ".join(f"W = {waves}: {' or '.join(map(str, sorted(stages)))}" for waves, stages in lengths.items())
    return HanayoError(
        f"CostModel: {error.field} has {error.given} values, as no schedule here has stages; give one per stage "
        f"({fitting}), or one number for a rank's whole share"
    )
