"""Counts results by kind and by site, as the table of the battery."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.faults.battery.cases import PEERS
from tests.faults.battery.runner import Result

COLUMNS = ("injected", "detected", "named", "clean", "lost")


@dataclass(frozen=True)
class Row:
    """How many of the faults were injected, detected, named, clean, and how many cost a checkpoint."""

    name: str
    counts: tuple[int, int, int, int, int]

    @property
    def is_as_wanted(self) -> bool:
        """All, all, all, all, 0."""
        injected, *found, lost = self.counts
        return all(number == injected for number in found) and not lost


def row(name: str, results: Iterable[Result]) -> Row:
    """Count."""
    verdicts = [result.verdict for result in results if result.verdict.injected]
    counts = [sum(getattr(verdict, column) for verdict in verdicts) for column in COLUMNS]
    return Row(name, tuple(counts))  # type: ignore[arg-type]


def rows(results: Iterable[Result], by: Callable[[Result], str]) -> list[Row]:
    """A row for each value, in the order in which they come."""
    results = list(results)
    names = dict.fromkeys(by(result) for result in results)
    return [row(name, (result for result in results if by(result) == name)) for name in names]


def strategy_of(result: Result) -> str:
    """Whose strategy it was."""
    return result.case.layout if result.case.layout in PEERS else "hanayo"


def markdown(title: str, found: Iterable[Row]) -> str:
    """A table of a page."""
    lines = [f"| {title} | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    lines += [f"| {row.name} | {' | '.join(map(str, row.counts))} |" for row in found]
    return "\n".join(lines)
