"""Combines all ranks' records, and formats the figures as Markdown and as a picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from recipes.benchmarks.checkpoints.rank import Load, RankRecord, Save
from recipes.benchmarks.harness import Columns, Summary, page, span, table
from recipes.paper.figure import BLUE, GREEN, GREY, INK, ORANGE, new, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class SaveFigures:
    """A way to save, in seconds and bytes. Each round counts the slowest rank; memory is the most of any rank."""

    name: str
    blocked: Summary
    whole: Summary
    added: Summary
    memory: int
    written: int


@dataclass(frozen=True)
class LoadFigures:
    """A way to load, in seconds and bytes."""

    name: str
    cold: Summary
    warm: Summary
    memory: int
    equal: bool
    """whether all ranks got the saved values each time, bit for bit"""


@dataclass(frozen=True)
class CaseFigures:
    """All figures of one number of ranks."""

    num_ranks: int
    num_bytes: int
    """of all ranks' tensors"""
    step: float
    """an ordinary step, in seconds"""
    saves: tuple[SaveFigures, ...]
    loads: tuple[LoadFigures, ...]

    @staticmethod
    def combined(ranks: Sequence[RankRecord]) -> "CaseFigures":
        """Combine all ranks' records."""
        steps = [save.step for record in ranks for saves in record.saves.values() for save in saves]
        return CaseFigures(
            len(ranks),
            sum(record.num_bytes for record in ranks),
            median(steps),
            tuple(_save_figures(name, [record.saves[name] for record in ranks]) for name in ranks[0].saves),
            tuple(_load_figures(name, [record.loads[name] for record in ranks]) for name in ranks[0].loads),
        )


def _save_figures(name: str, ranks: Sequence[Sequence[Save]]) -> SaveFigures:
    blocked, whole, added = (_slowest(ranks, what) for what in ("blocked", "whole", "added"))
    memory, written = (max(getattr(one, what) for rank in ranks for one in rank) for what in ("memory", "written"))
    return SaveFigures(name, blocked, whole, added, memory, written)


def _load_figures(name: str, ranks: Sequence[Sequence[Load]]) -> LoadFigures:
    every = list(chain.from_iterable(ranks))
    memory, equal = max(one.memory for one in every), all(one.equal for one in every)
    return LoadFigures(name, _slowest(ranks, "cold"), _slowest(ranks, "warm"), memory, equal)


def _slowest(ranks: Sequence[Sequence[Any]], what: str) -> Summary:
    """The times of each round's slowest rank."""
    return Summary.of([max(getattr(one, what) for one in turn) for turn in zip(*ranks, strict=True)])


def _seconds(head: str, what: str) -> Columns:
    """The columns of the median, and of the least and greatest value."""
    figure = attrgetter(what)
    return (head, lambda one: f"{figure(one).median:.2f}"), ("min-max", lambda one: span(figure(one), 2, 1))


MEMORY: tuple[str, Callable[[Any], str]] = ("memory MB", lambda one: _megabytes(one.memory))
SAVE_COLUMNS: Columns = (
    ("save", lambda one: one.name),
    *_seconds("training waits s", "blocked"),
    *_seconds("whole after s", "whole"),
    ("makes training longer by s", lambda one: f"{one.added.median:.2f}"),
    MEMORY,
    ("written MB", lambda one: _megabytes(one.written)),
)
LOAD_COLUMNS: Columns = (
    ("load", lambda one: one.name),
    *_seconds("from the disk s", "cold"),
    *_seconds("from the page cache s", "warm"),
    MEMORY,
    ("equal", lambda one: "yes" if one.equal else "NO"),
)


def text(cases: Sequence[CaseFigures], machine: Sequence[str]) -> str:
    """The figures as Markdown."""
    tables = ((f"## {_title(one)}", table(SAVE_COLUMNS, one.saves), table(LOAD_COLUMNS, one.loads)) for one in cases)
    return page(machine, *chain.from_iterable(tables))


def _title(case: CaseFigures) -> str:
    share = _megabytes(case.num_bytes // case.num_ranks)
    return f"{case.num_ranks} ranks, {share} MB each, steps of {case.step:.2f} s"


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
