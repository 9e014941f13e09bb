"""The four tiers of the suite: which one a test belongs to, and how long each took.

deciding -> executing -> integrating -> gpu         the quick ones first
"""

from collections import defaultdict
from dataclasses import dataclass, field

TIERS = {
    "deciding": ("schedule", "plotting", "planner", "test_topology.py", "test_errors.py"),
    "executing": ("harness", "runtime", "partition", "tensor3d", "checkpoint"),
    "integrating": ("strategy", "equivalence", "recipes", "cli", "packaging", "faults"),
    "gpu": ("gpu",),
}
ORDER = list(TIERS)
_TIER_OF = {place: tier for tier, places in TIERS.items() for place in places}


def tier_of(node_id: str) -> str:
    """The tier of a test by its place: `tests/<folder>/...` or `tests/<file>`. Unknown folders integrate.

    Example:
        >>> tier_of("tests/runtime/test_engine.py::test_plays")
        'executing'
    """
    place = node_id.partition("::")[0].removeprefix("tests/").split("/")[0]
    return _TIER_OF.get(place, "integrating")


@dataclass
class Durations:
    """Seconds and tests per tier, set-up and teardown included."""

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
