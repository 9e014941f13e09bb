"""Layout: chooses the schedule, stages, waves and micro-batches of a run, before any process starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lightning_hanayo.errors import HanayoError, counted, nearest
from lightning_hanayo.schedule import CostModel, Schedule, Timeline, build, schedule_names, simulate, with_loss_stage
from lightning_hanayo.schedule.communication import first_microbatches, forwards_before_backwards
from lightning_hanayo.schedule.cost import gather_compute_scatter
from lightning_hanayo.schedule.registry import AUTO, WAVES, Depth, registered, sizes_for

COSTS = CostModel(message=0.05)
"""T_F = 1, T_B = 2, and T_C between the paper's NVLink and PCIe clusters: the guess until anything is measured"""
RECOMPUTING = {"blocks": replace(COSTS, backward_input=2.0), "attention": replace(COSTS, backward_input=1 + 1 / 3)}
"""the guess where the backward of inputs runs blocks again, or their attention: 4 of 12 of their weights"""
PAIR_SEGMENTS = gather_compute_scatter()
"""the guess for pairs: a cube whose link is busy as long as its devices"""
SINGLE_STAGE = "1f1b"
"""has one stage per rank; `"auto"` on one rank, where micro-batches run one after another, and for short stacks"""


class TooFewBlocks(HanayoError):
    """A schedule has more stages than the stack has blocks."""


@dataclass(frozen=True)
class Layout:
    """The schedule, stages and micro-batches of one pipeline.

    Example:
        >>> choose(num_ranks=2, num_blocks=8).num_waves
        2
    """

    schedule: str
    """the name of a schedule, or the path of a CSV table"""
    num_ranks: int
    num_waves: int
    num_microbatches: int
    activation_budget: float | None = None
    costs: CostModel = COSTS
    """what the order is optimized for; values per stage may be for smaller stages, which are added up"""
    steady: bool = False
    """whether steps follow each other without a barrier, and the order is optimized for that"""
    separate_loss_stage: bool = False
    """whether head and loss are a stage of their own even if the stack is one stage"""
    pairs: bool = False
    """whether ranks run two micro-batches at once"""
    runs_step_once: bool = False
    """whether the step runs once on the whole batch: then no backward begins before the last forward"""

    @property
    def num_stages(self) -> int:
        """Stages that hold blocks; a loss stage holds none."""
        if _depth(self.schedule) == "waves":
            return 2 * self.num_ranks * self.num_waves
        table = self.table(self.num_microbatches)
        return table.num_stages - table.loss_stage

    @property
    def ends_on_first_rank(self) -> bool:
        """Whether the last blocks are on rank 0, as in a wave."""
        return not self.table(self.num_microbatches).loss_stage

    @cache  # noqa: B019 - layouts are few, and equal ones share their tables
    def table(self, num_microbatches: int) -> Schedule:
        """The schedule for a batch of that many micro-batches. It ends on rank 0, where the loss is.

        A smaller batch than usual runs the first micro-batches of the usual table: no search in the middle of a run.
        """
        if num_microbatches < self.num_microbatches:
            return first_microbatches(self.table(self.num_microbatches), num_microbatches)
        if _is_file(self.schedule):
            made = _of_file(self.schedule, num_microbatches)
            return forwards_before_backwards(made) if self.runs_step_once else made
        depth = _depth(self.schedule)
        waves = self.num_waves
        sizes: Any = sizes_for(self.schedule, waves) if depth == "stages" else {"num_waves": waves}
        # what the order depends on: nothing where it is fixed, up to the pairs
        costs = self.stage_costs if depth == "waves" else None
        if depth != "waves" and self.pairs:
            costs = replace(COSTS, segments=self.costs.segments) if self.costs.is_per_stage else self.costs
        schedule = build(
            self.schedule,
            num_ranks=self.num_ranks,
            num_microbatches=num_microbatches,
            costs=costs,
            activation_budget=self.activation_budget,
            steady=self.steady,
            pairs=self.pairs,
            forwards_first=self.runs_step_once,
            **sizes,
        )
        made = _ending_on_rank_0(schedule, self.separate_loss_stage)
        return forwards_before_backwards(made) if self.runs_step_once else made

    @property
    def stage_costs(self) -> CostModel:
        """`costs` for the stages of this layout.

        Raises:
            HanayoError: `costs` are for stages that can't be added up to these.
        """
        return self.costs.merged(self.num_stages)

    def with_shares(self, shares: Sequence[float]) -> "Layout":
        """The same layout with an order for stages that have these shares of the model's time.

        `costs` are numbers. Other schedules than waves have a fixed order, and stay as they are.
        """
        if _depth(self.schedule) != "waves" or isinstance(self.costs.forward, tuple):
            return self
        times = ("forward", "backward_input", "backward_weight")
        own: dict[str, Any] = {
            name: tuple(getattr(self.costs, name) * self.num_ranks * share for share in shares) for name in times
        }
        return replace(self, costs=replace(self.costs, **own))

    def simulate(self, num_microbatches: int | None = None) -> Timeline:
        """A batch under these costs: a whole one, or one of fewer micro-batches."""
        return simulate(self.table(num_microbatches or self.num_microbatches), self.stage_costs)

    def step_time(self) -> float:
        """The time of one step under these costs; if steps are steady, the time that each of many steps adds."""
        table = self.table(self.num_microbatches)
        return simulate(table, self.stage_costs, steps=2 if self.steady else 1).step_times[-1]

    def predict(self, num_microbatches: int | None = None) -> float:
        """The simulated bubble ratio of a batch."""
        return self.simulate(num_microbatches).bubble_ratio


def _ending_on_rank_0(schedule: Schedule, separate_loss_stage: bool = False) -> Schedule:
    """Add a loss stage where one is needed. A single stage holds head and loss itself, unless asked otherwise."""
    return with_loss_stage(schedule) if schedule.num_stages > 1 or separate_loss_stage else schedule


def _of_file(path: str, num_microbatches: int) -> Schedule:
    schedule = _ending_on_rank_0(Schedule.from_csv(path))
    if num_microbatches > schedule.num_microbatches:
        own = schedule.num_microbatches
        what = f"{schedule.name} is a table for {own} micro-batches, and a batch has {num_microbatches}"
        raise HanayoError(f"{what}; set num_microbatches={own}")
    return first_microbatches(schedule, num_microbatches)


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
    separate_loss_stage: bool = False,
    pairs: bool = False,
    runs_step_once: bool = False,
) -> Layout:
    """Choose everything that is `"auto"`: the wave schedule and W that simulate best, two micro-batches per rank.

    One rank has nothing to overlap with: unless a schedule is named, its stack is one stage, whatever `num_waves`. On
    several, a stack of fewer than 2P blocks has one stage per rank.

    Args:
        num_ranks: P, pipeline ranks.
        num_blocks: the blocks of the stack; every stage needs one.
        num_waves: W.
        num_microbatches: B.
        schedule: a name, `"auto"`, or the path of a CSV table.
        activation_budget: the most activations a rank may hold, in M_a.
        costs: in any unit of time, instead of the guess `COSTS`. If given per stage, there can't be more stages.
        steady: whether ranks begin their next step while others still end this one. Then layouts are compared by the
            time that each step adds.
        separate_loss_stage: give head and loss a stage of their own even if the stack is one stage.
        pairs: let ranks run two micro-batches at once. The order is chosen for a cube whose link is busy as long as its
            devices, unless `costs` have segments.
        runs_step_once: let no backward begin before the last forward.

    Raises:
        HanayoError: an unknown schedule, or costs of other stages.
        TooFewBlocks: than stages; the message names the nearest sizes that fit.
    """
    check_schedule(schedule)
    names = [schedule]
    if schedule == AUTO and num_ranks == 1:
        names, num_waves = [SINGLE_STAGE], 1
    elif schedule == AUTO:  # of equally fast ones the first is taken
        names = [one for one in schedule_names() if _depth(one) == "waves"]
    if num_microbatches == "auto":
        num_microbatches = 2 * num_ranks if num_ranks > 1 else 1
        if _is_file(schedule):
            num_microbatches = Schedule.from_csv(schedule).num_microbatches
    waves = [num_waves] if num_waves != "auto" else WAVES if _depth(names[0]) in ("waves", "stages") else [1]
    relative = COSTS
    if costs is not None:  # with T_F = 1, the unit of `COSTS`: an order depends on the ratios of costs only
        forward = sum(costs.forward) / num_ranks if isinstance(costs.forward, tuple) else costs.forward
        relative = costs.scaled(1 / forward) if forward else costs
    if pairs and not relative.segments:
        relative = replace(relative, segments=PAIR_SEGMENTS)
    others = num_microbatches, activation_budget, relative, steady, separate_loss_stage, pairs, runs_step_once
    layouts = [Layout(name, num_ranks, wave, *others) for wave in waves for name in names]
    fitting = [layout for layout in layouts if _check_ranks(layout).num_stages <= num_blocks]
    if not fitting and (schedule, num_waves) == (AUTO, "auto") and num_ranks <= num_blocks < 2 * num_ranks:
        fitting = [Layout(SINGLE_STAGE, num_ranks, 1, *others)]
    if not fitting:
        raise TooFewBlocks(_too_few(layouts[0], num_blocks))
    return min(_with_costs(fitting), key=Layout.step_time)


def _with_costs(layouts: list[Layout]) -> list[Layout]:
    """The layouts whose stages the given costs are for, or can be added up for."""
    fitting, wrong = [], ""
    for layout in layouts:
        try:
            layout.stage_costs  # noqa: B018 - only whether there are any
            fitting.append(layout)
        except HanayoError as error:
            wrong = wrong or str(error)
    if not fitting:
        first, way_out = layouts[0], "Measure with as many stages, or 2, 3, ... times as many; or leave costs out"
        sizes = f"{first.schedule} over {first.num_ranks} pipeline ranks with num_waves={first.num_waves}"
        raise HanayoError(f"costs: {wrong} of {sizes}. {way_out}")
    return fitting


_ANSWERS = {
    "chimera": "it holds two copies of the model, with losses on two ranks at once, but training_step runs on one. A "
    "wave (schedule='hanayo-zb') has a smaller bubble, and one copy of the weights.",
    "zero-bubble": "zero-bubble schedules are 'zb-h1', 'zbv', 'interleaved-zb', and as a wave 'hanayo-zb'",
}


def check_schedule(name: str) -> None:
    """Accept the name of a schedule that training can run, `"auto"`, or the path of a CSV table.

    Raises:
        HanayoError: there is no such schedule, or training can't run it.
    """
    if _is_file(name):
        if not Path(name).is_file():
            raise HanayoError(f"schedule={name!r}: there is no such file")
    elif name not in (*schedule_names(), AUTO):
        why = _ANSWERS.get(name.lower().replace("_", "-")) or nearest(name, [*schedule_names(), AUTO])
        raise HanayoError(f"schedule={name!r} is unknown; {why}")


def _is_file(name: str) -> bool:
    return name.endswith(".csv")


def _depth(name: str) -> Depth | None:
    """How many stages per rank the schedule can have; None for a file."""
    return None if _is_file(name) else registered(name).depth


def _check_ranks(layout: Layout) -> Layout:
    if _depth(layout.schedule) == "waves":
        return layout  # these always fit, and a table takes time to make
    table = layout.table(layout.num_microbatches)
    if table.num_ranks != layout.num_ranks:
        raise HanayoError(f"{layout.schedule} is a table for {table.num_ranks} pipeline ranks, not {layout.num_ranks}")
    if table.stage_ranks[0] != 0:
        raise HanayoError(f"{layout.schedule} has stage 0 on rank {table.stage_ranks[0]}; training begins on rank 0")
    return layout


def _too_few(layout: Layout, num_blocks: int) -> str:
    size, stages = layout.num_ranks, layout.num_stages
    fitting = next(ranks for ranks in range(min(size, num_blocks), 0, -1) if size % ranks == 0)
    return (
        f"the stack has {counted(num_blocks, 'block')}, but {layout.schedule} over {counted(size, 'pipeline rank')} "
        f"with num_waves={layout.num_waves} has {counted(stages, 'stage')} ({stages // size} per rank), and every "
        f"stage needs a block. This fits: pipeline_parallel_size={fitting}, num_waves='auto', schedule='auto'."
    )
