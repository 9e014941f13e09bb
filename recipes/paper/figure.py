"""Creates matplotlib figures without pyplot or a window system, and saves them reproducibly."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT = "#1c1c1c", "#8a8a8a"
BLUE, ORANGE, GREEN, RED, VIOLET, GREY = "#4c86c6", "#e8a33d", "#5fa55a", "#c8553d", "#8e6bb5", "#9a9a9a"
WAVES = "#e9b7a6", "#d8846c", RED
"""colours of our schedules with one, two and four waves"""


def new(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=112, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(axes: "Axes", title: str = "", x: str = "", y: str = "") -> None:
    """Style the axes: no box, light horizontal lines behind, labels."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#e6e2d8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)


def save(figure: "Figure", path: Path) -> None:
    """Save as PNG, without matplotlib's version in its metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
