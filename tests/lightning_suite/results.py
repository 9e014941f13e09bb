"""What came of each test in one run of Lightning's tests, and where two runs differ."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class TestResult:
    """What came of one test: "passed", "failed", "skipped", "crashed" (the process ended) or "hung"."""

    __test__ = False  # it isn't one for pytest

    name: str
    outcome: str
    message: str = ""
    engine_runs: int = 0
    """how often the engine ran a program"""
    seconds: float = 0.0
    details: str = field(default="", repr=False)
    """the end of the traceback"""

    @property
    def package(self) -> str:
        """The folder of Lightning's tests that it is in; "." if in none."""
        parts = Path(self.name.split("::")[0]).parts
        inside = parts[parts.index("tests_pytorch") + 1 :]
        return inside[0] if len(inside) > 1 else "."


@dataclass(frozen=True)
class SuiteRun:
    """All tests, run with one strategy."""

    column: str
    """stock, ddp, hanayo 1 or hanayo 2"""
    date: str
    machine: str
    versions: dict[str, str]
    results: dict[str, TestResult]

    def passed(self) -> set[str]:
        """The names of the tests that passed."""
        return {name for name, result in self.results.items() if result.outcome == "passed"}

    def save(self, path: Path) -> None:
        """Write all of it as JSON."""
        path.write_text(json.dumps({**vars(self), "results": [asdict(r) for r in self.results.values()]}, indent=1))

    @staticmethod
    def load(path: Path) -> "SuiteRun":
        """Read what `save` has written."""
        values = json.loads(path.read_text())
        return SuiteRun(**{**values, "results": by_name(TestResult(**result) for result in values["results"])})


def by_name(results: Iterable[TestResult]) -> dict[str, TestResult]:
    """The last result of each test, sorted by name."""
    return dict(sorted({result.name: result for result in results}.items()))
