"""Compares `hanayo-zb` with its best peer in equal memory when messages take time and stages are uneven.

Peers have as many stages per rank and hold at most P M_a; a schedule that holds more under a condition is left out of
it. Slow stages and ranks are those of each schedule's own placement, P = 4:

                            wave, W = 1                loop, V = 2
    rank 0's stages         0 and 7                    0 and 4
    the turn, stage P       4: second on rank 3        4: second on rank 0
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_hanayo.schedule import CostModel, Schedule, build, simulate
from lightning_hanayo.schedule.search.evaluator import SchedulingProblem
from lightning_hanayo.schedule.search.search import lower_bounds
from lightning_hanayo.schedule.table import loop, zigzag
from recipes.paper import figure
from recipes.paper.page import markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = (4, 8)
"""P"""

WAVES = (1, 2, 4)
"""W; 2W stages per rank"""

LATE = 1 + 1e-9
"""ratios above this are more than a rounding error"""


Slow = Literal["none", "stage 1", "stage P", "last stage", "rank 0's"]

SLOW: tuple[Slow, ...] = ("stage 1", "stage P", "last stage", "rank 0's")
"""A single slow stage takes 1.5 times as long, rank 0's stages 1.3 times."""


@dataclass(frozen=True)
class Condition:
    """The conditions of a step: B / P, T_C in T_F, and the slow stages."""

    load: int
    message: float
    slow: Slow = "none"

    @property
    def label(self) -> str:
        """Its name in the tables."""
        what = {"none": "even", "rank 0's": "rank 0's stages x 1.3"}.get(self.slow, f"{self.slow} x 1.5")
        return f"{what}, T_C = {self.message:g}" + (", B = P" if self.load == 1 else "")

    def costs(self, stage_ranks: tuple[int, ...]) -> CostModel:
        """Costs with F = I = W for stages on these ranks; an even rank's share takes 1."""
        num_ranks, num_stages = max(stage_ranks) + 1, len(stage_ranks)
        times = [num_ranks / num_stages] * num_stages
        one = {"stage 1": 1, "stage P": num_ranks, "last stage": num_stages - 1}.get(self.slow)
        if one is not None:
            times[one] *= 1.5
        elif self.slow == "rank 0's":
            times = [1.3 * time if rank == 0 else time for time, rank in zip(times, stage_ranks, strict=True)]
        each = tuple(times)
        return CostModel(each, each, each, self.message)


CONDITIONS = (
    Condition(1, 0.05),
    *(Condition(2, message) for message in (0.02, 0.05, 0.1)),
    *(Condition(2, message, slow) for slow in SLOW for message in (0, 0.05)),
)


@dataclass(frozen=True)
class Contest:
    """Makespans in T_F under one condition."""

    peer: str
    """name of the best peer"""
    theirs: float
    ours: float
    bound: float
    """lower bound for every schedule with our placement"""

    @property
    def verdict(self) -> str:
        """Ours / theirs; marked if the peer is faster, and if no wave could be as fast."""
        mark = "" if self.ours <= self.theirs * LATE else " (!)" if self.bound <= self.theirs * LATE else " (bound)"
        return f"{self.ours / self.theirs:.3f}{mark}"


@cache
def contest(condition: Condition, num_ranks: int, num_waves: int) -> Contest:
    """Simulate the peers and ours."""
    peers = {name: _simulated(name, condition, num_ranks, num_waves) for name in _peers(num_waves)}
    times = {name: time for name, (time, peak) in peers.items() if peak <= num_ranks * LATE}
    best = min(times, key=times.__getitem__)
    ours, peak = _simulated("hanayo-zb", condition, num_ranks, num_waves)
    assert peak <= num_ranks * LATE
    return Contest(best, times[best], ours, bound(condition, num_ranks, num_waves))


def bound(condition: Condition, num_ranks: int, num_waves: int) -> float:
    """A lower bound for W waves: the time before a rank's first stage, plus all its work."""
    placement = zigzag(num_ranks, num_waves)
    shape = Schedule("shape", placement, ((),) * num_ranks, condition.load * num_ranks)
    return lower_bounds(SchedulingProblem.of(shape, condition.costs(placement), num_ranks))[0]


def _peers(num_waves: int) -> tuple[str, ...]:
    return ("interleaved-zb", "interleaved", "hanayo", *(("zbv", "v-half", "v-min") if num_waves == 1 else ()))


def _simulated(name: str, condition: Condition, num_ranks: int, num_waves: int) -> tuple[float, float]:
    """Makespan in T_F and highest peak in M_a. Schedules that choose their order do so for these costs."""
    stages, num_microbatches = 2 * num_waves, condition.load * num_ranks
    if name.startswith("interleaved"):
        costs = condition.costs(loop(num_ranks, stages))
        schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_stages_per_rank=stages)
    else:
        costs = condition.costs(zigzag(num_ranks, num_waves))
        schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_waves=num_waves, costs=costs)
    timeline = simulate(schedule, costs)
    return timeline.makespan, max(timeline.peak_activations)


def table(num_ranks: int) -> str:
    """The block for P: a row per condition and W."""
    rows = []
    for condition in CONDITIONS:
        for waves in WAVES:
            one = contest(condition, num_ranks, waves)
            times = f"{one.theirs:.2f}", f"{one.ours:.2f}", f"{one.bound:.2f}"
            label = condition.label if waves == WAVES[0] else ""
            rows.append((label, str(waves), one.peer, *times, one.verdict))
    return markdown(("stages, messages", "W", "best peer", "its makespan", "ours", "bound", "ours / peer"), rows)


def draw(path: Path) -> None:
    """Draw our makespan relative to the best peer's, and the bound."""
    plot = figure.new(9.5, 5.2)
    panels = plot.subplots(1, len(SIZES), sharex=True, sharey=True)
    for axes, num_ranks in zip(panels, SIZES, strict=True):
        _draw_panel(axes, num_ranks)
    panels[0].set_yticks(range(len(CONDITIONS)), [condition.label for condition in CONDITIONS])
    panels[0].set_ylim(len(CONDITIONS) - 0.5, -0.5)
    handles, labels = panels[0].get_legend_handles_labels()
    plot.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.save(plot, path)


def _draw_panel(axes: "Axes", num_ranks: int) -> None:
    for place, (waves, shade) in enumerate(zip(WAVES, figure.WAVES, strict=True)):
        contests = [contest(condition, num_ranks, waves) for condition in CONDITIONS]
        heights = [row + 0.24 * (place - 1) for row in range(len(contests))]
        ratios = [100 * (one.ours / one.theirs - 1) for one in contests]
        bounds = [100 * (one.bound / one.theirs - 1) for one in contests]
        axes.plot(ratios, heights, "o", color=shade, markersize=5, label=f"hanayo-zb W={waves}")
        label = "no W waves can be faster" if waves == WAVES[-1] else None
        axes.plot(bounds, heights, "|", color=figure.SOFT, markersize=7, zorder=1, label=label)
    for row in range(0, len(CONDITIONS), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="#f5f2ea", zorder=0)
    axes.axvline(0, color=figure.INK, linewidth=0.9)
    figure.plain(axes, f"P = {num_ranks}", "makespan relative to the best peer's [%]")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#e6e2d8", linewidth=0.8)
