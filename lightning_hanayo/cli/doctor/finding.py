"""One line of what `hanayo doctor` has found: what was looked at, what it is, how good that is, and the way out."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Level = Literal["ok", "note", "problem"]
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """What one look has found.

    Args:
        topic: such as "disk".
        name: what was looked at, such as "free space of /tmp".
        value: what it is.
        level: "note": something to know, which makes no run fail by itself; "problem": a run would fail, or be wrong.
        advice: the way out, in one line; "" if all is well.
    """

    topic: str
    name: str
    value: str
    level: Level = "ok"
    advice: str = ""

    def flagged_if(self, is_bad: bool, level: Level, advice: str) -> "Finding":
        """The same finding; at this level and with this advice if it is bad."""
        return replace(self, level=level, advice=advice) if is_bad else self


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if something would make a run fail, else 0."""
    return int(any(finding.level == "problem" for finding in findings))


def gibibytes(num_bytes: float) -> str:
    """A size for reading.

    Example:
        >>> gibibytes(3 * 2**29), gibibytes(2**26)
        ('1.5 GiB', '64 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"
