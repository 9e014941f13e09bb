"""Measures checkpoints: ours, torch's distributed checkpoint, and one file through rank 0.

python -m recipes.benchmarks.checkpoints --ranks 2 4 --json checkpoints.json --table checkpoints.md
python -m recipes.benchmarks.checkpoints --gigabytes 0.1 --folder /dev/shm --rounds 1
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from recipes.benchmarks.checkpoints.rank import NAMES, Load, Plan, RankRecord, Save, run_all
from recipes.benchmarks.checkpoints.ways import Sizes
from recipes.benchmarks.harness import (
    LOOPBACK,
    ORDINARY,
    Columns,
    Findings,
    Summary,
    describe,
    new_parser,
    number,
    page,
    read,
    run,
    run_ranks,
    span,
    stored,
    table,
)
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


def _in_seconds(head: str, what: str) -> Columns:
    """The columns of the median, and of the least and greatest value."""
    figure = attrgetter(what)
    return (head, lambda one: f"{figure(one).median:.2f}"), ("min-max", lambda one: span(figure(one), 2, 1))


MEMORY: tuple[str, Callable[[Any], str]] = ("memory MB", lambda one: _megabytes(one.memory))
SAVE_COLUMNS: Columns = (
    ("save", lambda one: one.name),
    *_in_seconds("training waits s", "blocked"),
    *_in_seconds("whole after s", "whole"),
    ("makes training longer by s", lambda one: f"{one.added.median:.2f}"),
    MEMORY,
    ("written MB", lambda one: _megabytes(one.written)),
)
LOAD_COLUMNS: Columns = (
    ("load", lambda one: one.name),
    *_in_seconds("from the disk s", "cold"),
    *_in_seconds("from the page cache s", "warm"),
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


SECONDS_PER_GIGABYTE = 60
"""the longest that a save with its loads may take"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the requested files. Returns the exit code."""
    parser = new_parser("checkpoints", __doc__, picture="draw saving, loading and memory")
    number(parser, "--ranks", [2, 4], "")
    number(parser, "--gigabytes", 2.0, "all ranks' weights and Adam states together", "GB")
    number(parser, "--rounds", 3, "all ways in each")
    number(parser, "--products", 8, "products of 1024 x 1024 matrices in a step")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where checkpoints are written for a moment "
                        "(default: a temporary folder)")  # fmt: skip
    parser.add_argument("--again", type=Path, metavar="FILE.json", help="measure nothing: format the figures in it")
    return run(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    def again(data: Any) -> tuple[list[str], list[CaseFigures]]:
        return data["machine"], [read(CaseFigures, case) for case in data["cases"]]

    machine, cases = stored(options.again, again) if options.again else _run(options)
    data = {"machine": machine, "cases": cases}
    return Findings(text(cases, machine), data, {"picture": lambda path: draw(cases, path)})


def _run(options: argparse.Namespace) -> tuple[list[str], list[CaseFigures]]:
    cases = []
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.folder) as folder:
        plan = Plan(Sizes.of_bytes(1e9 * options.gigabytes), Path(folder), options.rounds, options.products)
        limit = 120 + SECONDS_PER_GIGABYTE * options.gigabytes * options.rounds * len(NAMES)
        for count in options.ranks:
            found = run_ranks(run_all, plan, [ORDINARY] * count, limit)
            cases.append(CaseFigures.combined([record for _, record in found]))
    where = f"checkpoints in {options.folder or 'a temporary folder'}"
    return describe(LOOPBACK, f"width {plan.sizes.width}, {options.rounds} rounds, {where}"), cases


if __name__ == "__main__":
    sys.exit(main())
