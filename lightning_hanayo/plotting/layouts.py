"""Draws the layouts of a plan: time over memory, the frontier, and the fastest by their numbers in the table.

time   :   .  .
       | 1_ .    .  .            frontier: no layout is both faster and smaller
       |   |_2 .
       |______|___ memory

Draws the schedules of a comparison in one image, the fastest on top, on one time axis.

hanayo-zb: makespan 24.8, bubble 3.0%; 4 M_a, 14 messages
small timeline, all ranks
1f1b: ...
                     time ->
"""

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, NamedTuple

from lightning_hanayo.plotting.palette import DARK
from lightning_hanayo.plotting.timeline import image_file, save_panels, summary
from lightning_hanayo.schedule.communication import messages_per_microbatch
from lightning_hanayo.schedule.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes


POINT, FRONTIER, NUMBERED = "#a3c9ee", "#4484c6", "#b8483c"
_SLOWEST = 3.0
"""times the fastest step: slower layouts are left out"""
_NEAR = 0.03
"""of the picture's height: numbers nearer than that would cover each other"""


class Dot(NamedTuple):
    """A layout."""

    seconds: float
    num_bytes: float
    name: str = ""


def save_layouts(path: str | Path, dots: Sequence[Dot], numbered: Sequence[Dot], *, limit: float, title: str) -> None:
    """Save the picture.

    Args:
        path: the file, ending in .png, .svg or .pdf.
        dots: all layouts that fit.
        numbered: those of the table, in its order.
        limit: bytes that a device has for them, drawn as a line.
        title: at the top.

    Raises:
        HanayoError: the suffix is no image format, or the file can't be written.
    """
    shown = worth_showing(dots, numbered)
    frontier = frontier_of(shown)
    with image_file(path, 9.0, 5.2) as figure:
        axes = figure.add_axes((0.08, 0.11, 0.89, 0.75))
        figure.text(0.08, 0.955, title, va="top", fontsize=11, weight="bold")
        axes.scatter([one.num_bytes / 1e9 for one in shown], [one.seconds for one in shown], s=6, color=POINT,
                     label=f"layouts that fit: {len(dots):,}", linewidths=0)  # fmt: skip
        axes.step([one.num_bytes / 1e9 for one in frontier], [one.seconds for one in frontier], where="post",
                  color=FRONTIER, linewidth=1.4, label="frontier: none is faster and smaller")  # fmt: skip
        axes.scatter([one.num_bytes / 1e9 for one in numbered], [one.seconds for one in numbered], s=26,
                     color=NUMBERED, label="those of the table, simulated", zorder=3)  # fmt: skip
        axes.axvline(limit / 1e9, color=DARK, linewidth=0.9, linestyle=":")
        axes.text(limit / 1e9, 1.0, " limit", transform=axes.get_xaxis_transform(), va="top", fontsize=8)
        axes.set(xlabel="GB on the device that needs the most", ylabel="seconds per step", xlim=(0, None))
        low, high = axes.get_ylim()
        axes.set_ylim(low - 0.06 * (high - low), high)
        _write_numbers(axes, numbered, _NEAR * (high - low))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=3)


def worth_showing(dots: Sequence[Dot], numbered: Sequence[Dot]) -> list[Dot]:
    """All but those that take several times as long as the fastest."""
    most = _SLOWEST * min(one.seconds for one in (*dots, *numbered))
    return [one for one in dots if one.seconds <= most]


def frontier_of(dots: Sequence[Dot]) -> list[Dot]:
    """Those for which no other one is both faster and smaller, the smallest first."""
    found: list[Dot] = []
    for one in sorted(dots):
        if not found or one.num_bytes < found[-1].num_bytes:
            found.append(one)
    return found[::-1]


def _write_numbers(axes: "Axes", numbered: Sequence[Dot], near: float) -> None:
    """Each number at its dot; those of dots that lie together are one text."""
    groups: list[tuple[Dot, list[int]]] = []
    for number, one in enumerate(numbered, 1):
        for first, numbers in groups:
            if abs(first.seconds - one.seconds) < near and abs(first.num_bytes / one.num_bytes - 1) < _NEAR:
                numbers.append(number)
                break
        else:
            groups.append((one, [number]))
    for one, numbers in groups:
        text = ", ".join(map(str, numbers))
        axes.annotate(text, (one.num_bytes / 1e9, one.seconds), (0, -6), textcoords="offset points", ha="center",
                      va="top", fontsize=8, color=NUMBERED)  # fmt: skip


def save_ranking(path: str | Path, comparison: Comparison, *, title: str, unit: str = "") -> None:
    """Save the image.

    Args:
        path: the file, ending in .png, .svg or .pdf.
        comparison: at least one candidate.
        title: at the top.
        unit: of time.

    Raises:
        HanayoError: the suffix is no image format, or the file can't be written.
    """
    panels = {
        f"{summary(one.timeline, unit, one.name)}; {one.peak:.4g} M_a{', over the budget' * (not one.within_budget)}, "
        f"{messages_per_microbatch(one.schedule)} messages": one.timeline
        for one in comparison.candidates
    }
    words = [shorten(f"{name} is left out: {reason}", 120) for name, reason in comparison.refused.items()]
    save_panels(path, panels, title=title, words=words, unit=unit)
