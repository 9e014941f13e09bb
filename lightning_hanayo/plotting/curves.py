"""Curves: the activations that each rank holds over time, drawn on a matplotlib axes, a row per rank.

rank 0 |    ___/~~~~\\___         from nothing to the most that any rank holds
rank 1 |  ____/~~~\\_____
"""

from typing import TYPE_CHECKING

from lightning_hanayo.plotting.palette import HELD, IDLE
from lightning_hanayo.schedule import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 0.86
"""of a row, of the 1 that it has"""


def draw_activations(timeline: Timeline, axes: "Axes", *, window: tuple[float, float]) -> None:
    """Draw the curves from `window`'s begin to its end, counted from the timeline's first start."""
    first, last = window
    peaks = timeline.peak_activations
    most = max(peaks, default=0.0) or 1.0
    for rank in range(timeline.num_ranks):
        axes.barh(rank, last - first, left=first, height=HEIGHT, color=IDLE, zorder=0)
        curve = timeline.activations(rank)
        times = [time - timeline.begin for time, _ in curve] + [timeline.makespan]
        held = [rank + HEIGHT / 2 - HEIGHT * now / most for _, now in curve]
        axes.fill_between(times, rank + HEIGHT / 2, [*held, held[-1]], step="post", color=HELD, linewidth=0, zorder=2)
    axes.set_xlim(first, last)
    axes.set_ylim(max(1, timeline.num_ranks) - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_ranks), [f"{peak:.3g} M_a" for peak in peaks], fontsize=7)
    axes.tick_params(axis="both", length=0, labelbottom=False)
    for side in axes.spines.values():
        side.set_visible(False)
