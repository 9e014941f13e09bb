"""Draws the README's picture: one step under three schedules, on one time axis.

1f1b               | rank 0 ... rank 3                    |
hanayo, 2 waves    | ...                           |
hanayo-zb, 2 waves | ...                       |
"""

from pathlib import Path

from lightning_hanayo.plotting.palette import DARK, KIND_COLOURS, KIND_NAMES
from lightning_hanayo.plotting.timeline import draw_actions
from lightning_hanayo.schedule import Timeline, build, simulate
from recipes.paper.figure import SOFT, save

ROWS = (
    ("1f1b", 1, "1f1b: the usual pipeline"),
    ("hanayo", 2, "hanayo: two waves, as in the paper"),
    ("hanayo-zb", 2, "hanayo-zb: two waves, and the backward in two pieces"),
)
"""schedule, waves, title"""
WIDTH, HEIGHT, DPI = 10.0, 4.9, 160


def timelines() -> list[Timeline]:
    """One step of each schedule, with F = I = W and free messages."""
    return [simulate(build(name, num_ranks=4, num_microbatches=8, num_waves=waves)) for name, waves, _ in ROWS]


def draw(path: Path) -> None:
    """Save the picture, at most 1600 pixels wide."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI)
    FigureCanvasAgg(figure)
    found = timelines()
    until = max(one.makespan for one in found)
    for number, (timeline, (_, _, title)) in enumerate(zip(found, ROWS, strict=True)):
        axes = figure.add_axes((0.075, 0.72 - 0.3 * number, 0.905, 0.2))
        draw_actions(timeline, axes, window=(0.0, until), numbers=False)
        axes.tick_params(axis="y", labelsize=9, length=0)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.axvline(timeline.makespan, color=DARK, linewidth=1.2)
        axes.set_title(title, loc="left", fontsize=12, weight="bold")
        idle = f"idle {timeline.bubble_ratio:.1%}, activations of {max(timeline.peak_activations):g} micro-batches"
        axes.set_title(idle, loc="right", fontsize=11, color=SOFT)
    kinds = {span.action.kind for one in found for span in one.spans}
    handles = [Patch(facecolor=KIND_COLOURS[kind][0], label=KIND_NAMES[kind]) for kind in KIND_COLOURS if kind in kinds]
    handles.append(Patch(alpha=0, label="fainter: stages on the way back up"))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=10)
    save(figure, path)
