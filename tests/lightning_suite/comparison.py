"""Compares the runs of several strategies with the stock one: a table per package, and the tests that are lost."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from tests.lightning_suite.results import SuiteRun

STOCK = "stock"
_REASONS = Path(__file__).with_name("reasons.toml")


@dataclass(frozen=True)
class Reason:
    """Why some tests can't pass: their names, where `*` stands for anything, and the runs that it is about."""

    why: str
    tests: tuple[str, ...]
    columns: tuple[str, ...] = ()
    """none: all"""

    def explains(self, test: str, column: str) -> bool:
        """Whether this is why the test is lost in this run."""
        patterns = (re.escape(pattern).replace(r"\*", ".*") for pattern in self.tests)
        return (not self.columns or column in self.columns) and any(re.fullmatch(p, test) for p in patterns)


def read_reasons(path: Path = _REASONS) -> list[Reason]:
    """The reasons that are known."""
    entries = tomllib.loads(path.read_text()).get("reason", [])
    return [Reason(e["why"], tuple(e["tests"]), tuple(e.get("columns", ()))) for e in entries]


@dataclass(frozen=True)
class Comparison:
    """What the other runs make of the tests that pass with the stock strategy: these are the ones that count."""

    stock: SuiteRun
    others: Sequence[SuiteRun]

    @staticmethod
    def of(runs: Sequence[SuiteRun]) -> "Comparison":
        """One of the runs is of the stock strategy."""
        stock = next(run for run in runs if run.column == STOCK)
        return Comparison(stock, [run for run in runs if run is not stock])

    @property
    def counted(self) -> list[str]:
        """The names of the tests that count."""
        return sorted(self.stock.passed())

    def lost(self, run: SuiteRun) -> list[str]:
        """The tests that count and don't pass in this run."""
        return sorted(set(self.counted) - run.passed())

    def header(self) -> list[str]:
        """The names of the table's columns."""
        return ["package", STOCK, *(run.column for run in self.others), "engine ran"]

    def rows(self) -> list[list[str]]:
        """For each package, and all: how many tests count, pass in each run, and in how many the engine ran."""
        packages = sorted({self.stock.results[name].package for name in self.counted})
        rows = [self._row(p, [n for n in self.counted if self.stock.results[n].package == p]) for p in packages]
        return [*rows, self._row("all", self.counted)]

    def _row(self, title: str, names: Sequence[str]) -> list[str]:
        passed = [str(len(run.passed() & set(names))) for run in self.others]
        ran = {name for run in self.others for name in names if _has_run(run, name)}
        return [title, str(len(names)), *passed, str(len(ran))]

    def table(self) -> Table:
        """The rows, to be printed."""
        table = Table(*self.header(), title="Tests of Lightning that pass")
        for row in self.rows():
            table.add_row(*row)
        return table


def short_name(test: str) -> str:
    """Without the folders that all tests are in."""
    return test.split("tests_pytorch/", 1)[-1]


def reason_for(test: str, column: str, reasons: Sequence[Reason]) -> Reason | None:
    """The first reason that explains it."""
    return next((reason for reason in reasons if reason.explains(short_name(test), column)), None)


def _has_run(run: SuiteRun, name: str) -> bool:
    return name in run.results and run.results[name].engine_runs > 0
