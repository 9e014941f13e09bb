"""The layout: which schedule over how many stages a run plays, decided before any process starts."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.schedule import (
    CostModel,
    Schedule,
    Timeline,
    build,
    reduction_order,
    schedule_names,
    simulate,
    with_loss_stage,
)
from lightning_hanayo.schedule.build import WAVES
from lightning_hanayo.schedule.simulation.comparison import merged

MESSAGE = 0.05
"""one hop in T_F, taken as a guess while nothing is measured: between the paper's NVLink and PCIe clusters"""
_WAVES = ("hanayo", "hanayo-zb")
"""schedules with W waves, of which `"auto"` takes the one that simulates better; the first where both are alike"""
_ALONE = ("1f1b",)
"""what `"auto"` is on one rank: a stage, whose micro-batches run one after the other"""
_LOOPS = ("interleaved", "interleaved-zb")
"""schedules with V stages per rank, of which `num_waves` asks for 2W"""

COSTS = CostModel(message=MESSAGE)
"""T_F = 1, T_B = 2, T_C = `MESSAGE`: what layouts are compared with before anything is measured"""


@dataclass(frozen=True)
class Layout:
    """Schedule, stages and micro-batches of one pipeline.

    Example:
        >>> choose(num_ranks=2, num_blocks=8).num_waves
        2
    """

    schedule: str
    num_ranks: int
    num_waves: int
    num_microbatches: int
    activation_budget: float | None = None
    costs: CostModel = COSTS
    """what the order is made for; per stage, or per smaller stage of which each of these holds as many in a row"""
    steady: bool = False
    """whether steps follow each other without a barrier, and the order is made for that"""
    apart: bool = False
    """whether head and loss are a stage of their own even where the stack is one stage"""

    @property
    def num_stages(self) -> int:
        """Stages that hold blocks; a loop's loss stage holds none."""
        if self.schedule in _WAVES:
            return 2 * self.num_ranks * self.num_waves
        table = self.table(self.num_microbatches)
        return table.num_stages - table.loss_stage

    @property
    def ends_on_first_rank(self) -> bool:
        """Whether the last blocks lie on rank 0, as in a wave."""
        return not self.table(self.num_microbatches).loss_stage

    def table(self, num_microbatches: int) -> Schedule:
        """The schedule for a batch of that many micro-batches, ending on rank 0, where the loss is.

        A smaller batch than usual plays what is left of the usual table: no search in the middle of a run.
        """
        if num_microbatches < self.num_microbatches:
            return _part(self.table(self.num_microbatches), num_microbatches)
        return _table(self, num_microbatches)

    @property
    def stage_costs(self) -> CostModel:
        """`costs` for the stages of this layout.

        Raises:
            HanayoError: they can't be made of those that `costs` are for.
        """
        return merged(self.costs, self.num_stages)

    def simulate(self) -> Timeline:
        """A whole batch under these costs."""
        return simulate(self.table(self.num_microbatches), self.stage_costs)

    def step_time(self) -> float:
        """What a step takes under these costs: by itself, or, if steps are steady, as one of many."""
        table = self.table(self.num_microbatches)
        return simulate(table, self.stage_costs, steps=2 if self.steady else 1).step_times[-1]

    def predict(self) -> float:
        """The bubble of a whole batch, simulated."""
        return self.simulate().bubble_ratio


@cache
def _table(layout: Layout, num_microbatches: int) -> Schedule:
    if layout.schedule.endswith(".csv"):
        return _of_file(layout.schedule, num_microbatches)
    schedule = build(
        layout.schedule,
        num_ranks=layout.num_ranks,
        num_microbatches=num_microbatches,
        num_waves=1 if layout.schedule in _LOOPS else layout.num_waves,
        num_stages_per_rank=2 * layout.num_waves if layout.schedule in _LOOPS else None,
        costs=layout.stage_costs if layout.schedule in _WAVES else None,  # the others' order is what it is
        activation_budget=layout.activation_budget,
        steady=layout.steady,
    )
    return _ending_on_rank_0(schedule, apart=layout.apart)


def _ending_on_rank_0(schedule: Schedule, *, apart: bool = False) -> Schedule:
    """A single stage holds head and loss itself, unless they shall stand apart."""
    return with_loss_stage(schedule) if schedule.num_stages > 1 or apart else schedule


def _of_file(path: str, num_microbatches: int) -> Schedule:
    schedule = _ending_on_rank_0(Schedule.from_csv(path))
    if num_microbatches > schedule.num_microbatches:
        raise HanayoError(
            f"{schedule.name} is a table for {schedule.num_microbatches} micro-batches, and a batch has "
            f"{num_microbatches}; set num_microbatches={schedule.num_microbatches}"
        )
    return _part(schedule, num_microbatches)


@cache
def _part(schedule: Schedule, num_microbatches: int) -> Schedule:
    """A table for the first micro-batches only: what is left of a valid order is a valid order.

    Reductions keep the order of the whole table: another data rank may play more micro-batches at the same time.
    """
    actions = tuple(
        tuple(action for action in row if action.microbatch is None or action.microbatch < num_microbatches)
        for row in schedule.actions
    )
    order = reduction_order(schedule)
    return replace(schedule, actions=actions, num_microbatches=num_microbatches, reduction_order=order)


def choose(
    *,
    num_ranks: int,
    num_blocks: int,
    num_waves: int | Literal["auto"] = "auto",
    num_microbatches: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    activation_budget: float | None = None,
    costs: CostModel | None = None,
    steady: bool = False,
    apart: bool = False,
) -> Layout:
    """The layout with what is `"auto"` chosen: the wave, two micro-batches per rank, the W that simulates best.

    One rank has nothing to overlap with: unless waves are asked for, its stack is one stage.

    `costs`, in any unit of time, take the place of the guess `COSTS`; given per stage, they rule out more stages. Where
    steps are `steady`, ranks begin their next one while others still end this one, and what each adds is what counts.
    `apart` keeps head and loss out of a single stage.

    Raises:
        HanayoError: an unknown schedule, fewer blocks than stages, or costs of other stages; the message names the
            nearest that fit.
    """
    check_schedule(schedule)
    names = (schedule,) if schedule != "auto" else _ALONE if (num_ranks, num_waves) == (1, "auto") else _WAVES
    if num_microbatches == "auto":
        num_microbatches = _from_table(schedule) or (2 * num_ranks if num_ranks > 1 else 1)
    waves = [num_waves] if num_waves != "auto" else list(WAVES) if names[0] in _WAVES + _LOOPS else [1]
    relative = COSTS if costs is None else in_forwards(costs, num_ranks)
    layouts = [
        Layout(name, num_ranks, wave, num_microbatches, activation_budget, relative, steady, apart)
        for wave in waves
        for name in names
    ]
    fitting = [layout for layout in layouts if _check_ranks(layout).num_stages <= num_blocks]
    if not fitting:
        raise HanayoError(_too_few(layouts[0], num_blocks))
    return min(_with_costs(fitting), key=Layout.step_time)


def in_forwards(costs: CostModel, num_ranks: int) -> CostModel:
    """The same costs with T_F = 1, the unit of `COSTS`: an order depends on nothing but what they are to each other."""
    forward = sum(costs.forward) / num_ranks if isinstance(costs.forward, tuple) else costs.forward
    return costs.scaled(1 / forward) if forward else costs


def _with_costs(layouts: list[Layout]) -> list[Layout]:
    """Those whose stages the costs given are for, or can be added up for."""
    wrong = [_wrong_costs(layout) for layout in layouts]
    if all(wrong):
        raise HanayoError(
            f"costs: {wrong[0]} of {layouts[0].schedule} over {layouts[0].num_ranks} pipeline ranks with "
            f"num_waves={layouts[0].num_waves}. Measure with as many stages, or 2, 3, ... times as many; or leave "
            "costs out"
        )
    return [layout for layout, reason in zip(layouts, wrong, strict=True) if not reason]


def _wrong_costs(layout: Layout) -> str:
    try:
        layout.stage_costs  # noqa: B018 - only whether there are any
    except HanayoError as error:
        return str(error)
    return ""


def check_schedule(name: str) -> None:
    """Accept the name of a schedule that training can play, `"auto"`, or the path of a table.

    Raises:
        HanayoError: there is no such schedule, or training can't play it.
    """
    if name == "chimera":
        raise HanayoError(
            "schedule='chimera' needs the loss on two ranks at once; HanayoStrategy plays the user's training_step on "
            "one. A wave (schedule='hanayo-zb') has less bubble, and the weights once."
        )
    if name.endswith(".csv"):
        if not Path(name).is_file():
            raise HanayoError(f"schedule={name!r}: there is no such file")
    elif name not in (*schedule_names(), "auto"):
        raise HanayoError(f"schedule={name!r} is unknown; {nearest(name, [*schedule_names(), 'auto'])}")


def _from_table(name: str) -> int | None:
    return Schedule.from_csv(name).num_microbatches if name.endswith(".csv") else None


def _check_ranks(layout: Layout) -> Layout:
    if layout.schedule in _WAVES:
        return layout  # without a table, which takes time to make
    table = layout.table(layout.num_microbatches)
    if table.num_ranks != layout.num_ranks:
        raise HanayoError(f"{layout.schedule} is a table for {table.num_ranks} pipeline ranks, not {layout.num_ranks}")
    if table.stage_ranks[0] != 0:
        raise HanayoError(f"{layout.schedule} has stage 0 on rank {table.stage_ranks[0]}; training begins on rank 0")
    return layout


def _too_few(layout: Layout, num_blocks: int) -> str:
    per_rank = layout.num_stages // layout.num_ranks
    valid = [(ranks, waves) for waves in range(layout.num_waves, 0, -1) for ranks in range(layout.num_ranks, 0, -1)
             if _stages(layout, ranks, waves) <= num_blocks]  # fmt: skip
    valid.sort(key=lambda size: (layout.num_ranks - size[0], layout.num_waves - size[1]))
    choices = " or ".join(f"pipeline_parallel_size={ranks}, num_waves={waves}" for ranks, waves in valid[:2])
    return (
        f"the stack has {num_blocks} blocks, but {layout.schedule} over {layout.num_ranks} pipeline ranks with "
        f"num_waves={layout.num_waves} has {layout.num_stages} stages ({per_rank} per rank), and every stage needs a "
        f"block. " + (f"Nearest that fit: {choices}." if choices else "A pipeline needs at least two blocks.")
    )


def _stages(layout: Layout, ranks: int, waves: int) -> int:
    return layout.num_stages // (layout.num_ranks * layout.num_waves) * ranks * waves
