"""Sorts the tests into four tiers, the fast ones first, and measures how long each takes.

deciding -> executing -> integrating -> gpu
"""

from collections import defaultdict
from dataclasses import dataclass, field

TIERS = {
    "deciding": ("schedule", "plotting", "planner", "test_topology.py", "test_errors.py", "test_imports.py"),
    "executing": ("harness", "runtime", "partition", "tensor3d", "checkpoint"),
    "integrating": ("strategy", "checking", "equivalence", "recipes", "cli", "packaging", "faults"),
    "gpu": ("gpu",),
}
ORDER = list(TIERS)
_TIER_OF = {folder: tier for tier, folders in TIERS.items() for folder in folders}


def tier_of(node_id: str) -> str:
    """The tier of a test by its path: `tests/<folder>/...` or `tests/<file>`. Unknown folders are "integrating".

    Example:
        >>> tier_of("tests/runtime/test_engine.py::test_runs")
        'executing'
    """
    folder = node_id.partition("::")[0].removeprefix("tests/").split("/")[0]
    return _TIER_OF.get(folder, "integrating")


@dataclass
class Durations:
    """Seconds and tests per tier, including set-up and teardown."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tests: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, node_id: str, seconds: float) -> None:
        """Count one phase of a test."""
        tier = tier_of(node_id)
        self.seconds[tier] += seconds
        self.tests[tier].add(node_id)

    def lines(self) -> list[str]:
        """One line per tier that ran."""
        return [
            f"{tier:<12} {len(self.tests[tier]):>5} tests {self.seconds[tier]:>8.1f} s"
            for tier in ORDER
            if tier in self.tests
        ]
