"""Formats the figures of checkpoints as Markdown and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.benchmarks.checkpoints.figures import CaseFigures, LoadFigures, SaveFigures
from recipes.benchmarks.harness import Summary
from recipes.paper.figure import BLUE, GREEN, GREY, INK, ORANGE, new, plain, save
from recipes.paper.table import markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAVE_HEAD = ("save", "training waits s", "min-max", "whole after s", "min-max", "makes training longer by s",
             "memory MB", "written MB")  # fmt: skip
LOAD_HEAD = ("load", "from the disk s", "min-max", "from the page cache s", "min-max", "memory MB", "equal")


def table(cases: Sequence[CaseFigures], machine: Sequence[str]) -> str:
    """The figures as Markdown."""
    parts = ["\n".join(f"- {line}" for line in machine)]
    for case in cases:
        parts += [f"## {_title(case)}", markdown(SAVE_HEAD, map(_save_row, case.saves)),
                  markdown(LOAD_HEAD, map(_load_row, case.loads))]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _title(case: CaseFigures) -> str:
    share = _megabytes(case.num_bytes // case.num_ranks)
    return f"{case.num_ranks} ranks, {share} MB each, steps of {case.step:.2f} s"


def _save_row(one: SaveFigures) -> tuple[str, ...]:
    return (one.name, *_seconds(one.blocked), *_seconds(one.whole), f"{one.added.median:.2f}",
            _megabytes(one.memory), _megabytes(one.written))  # fmt: skip


def _load_row(one: LoadFigures) -> tuple[str, ...]:
    return one.name, *_seconds(one.cold), *_seconds(one.warm), _megabytes(one.memory), "yes" if one.equal else "NO"


def _seconds(value: Summary) -> tuple[str, str]:
    return f"{value.median:.2f}", f"{value.least:.2f}-{value.most:.2f}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f}"


def draw(cases: Sequence[CaseFigures], path: Path) -> None:
    """A row for each number of ranks: what training waits for, loading, and memory."""
    figure = new(11.5, 0.4 + 2.9 * len(cases))
    for row, case in zip(figure.subplots(len(cases), 3, squeeze=False), cases, strict=True):
        _draw_saves(row[0], case)
        _draw_loads(row[1], case)
        _draw_memory(row[2], case)
    save(figure, path)


def _draw_saves(axes: "Axes", case: CaseFigures) -> None:
    plain(axes, f"{case.num_ranks} ranks: saving, s", y="seconds")
    names = [one.name for one in case.saves]
    _bars(axes, names, [one.whole for one in case.saves], -0.2, GREY, "until it is whole")
    _bars(axes, names, [one.blocked for one in case.saves], 0.2, BLUE, "training waits")


def _draw_loads(axes: "Axes", case: CaseFigures) -> None:
    plain(axes, f"{case.num_ranks} ranks: loading, s", y="seconds")
    names = [one.name for one in case.loads]
    _bars(axes, names, [one.cold for one in case.loads], -0.2, GREEN, "from the disk")
    _bars(axes, names, [one.warm for one in case.loads], 0.2, ORANGE, "from the page cache")


def _draw_memory(axes: "Axes", case: CaseFigures) -> None:
    plain(axes, f"{case.num_ranks} ranks: memory above the state, MB", x="MB, of the rank with the most")
    found = {f"save: {one.name}": one.memory for one in case.saves}
    found |= {f"load: {one.name}": one.memory for one in case.loads}
    bars = axes.barh(range(len(found)), [num_bytes / 1e6 for num_bytes in found.values()], color=BLUE)
    axes.bar_label(bars, list(map(_megabytes, found.values())), padding=2, fontsize=7)
    axes.set_yticks(range(len(found)), list(found), fontsize=7)
    axes.invert_yaxis()  # the first on top
    axes.grid(visible=False)
    axes.margins(x=0.12)


def _bars(axes: "Axes", names: Sequence[str], values: Sequence[Summary], shift: float, colour: str, label: str) -> None:
    """Bars to the medians, with their numbers, and lines from the least to the greatest value."""
    places = [place + shift for place in range(len(names))]
    axes.bar(places, [value.median for value in values], width=0.4, color=colour, label=label)
    axes.vlines(places, [value.least for value in values], [value.most for value in values], color=INK, linewidth=1)
    for place, value in zip(places, values, strict=True):
        text = f"{value.median:.0f}" if value.median >= 100 else f"{value.median:.2g}"
        axes.annotate(text, (place, value.most), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=6.5)
    axes.margins(y=0.3)  # room for the legend
    axes.legend(fontsize=7, frameon=False)
